// Package sinktest checks that a sink keeps what [projector.Sink] and the forms'
// targets promise. A sink that does not pass is no sink: the model would be wrong
// after a crash, a takeover or a lost answer, and nothing would tell.
//
// It is for the sinks of this module and for anyone's own. The sink's author writes
// one test, which describes the sink as a [Subject]:
//
//	func TestConformance(t *testing.T) {
//		sinktest.Run(t, sinktest.Subject[*mysink.Tx]{
//			Features: sinktest.Features{Transactions: true, LoadWaits: true, Adds: true},
//			Open: func(t sinktest.T) sinktest.Store[*mysink.Tx] {
//				db := emptyDatabase(t)
//				return sinktest.Store[*mysink.Tx]{
//					Sink:      func(t sinktest.T) projector.Sink[*mysink.Tx] { return mysink.New(db.Connect(t)) },
//					Documents: …, // a target for a Mirror, and a reader of its rows
//					Counts:    …, // a target for a Rollup
//					…
//				}
//			},
//		})
//	}
//
// The package's example is a whole one.
//
// # What to bring
//
// [Features] states the guarantee, and with it which checks run. What is usual:
//
//	                                        Transactions  Trials  LoadWaits  Adds  DecimalSums  Owners
//	PostgreSQL, MongoDB                     yes           (yes)   yes        yes   yes          yes
//	Redis: queued commands in one EXEC,     yes           (yes)   no         yes   no           yes
//	checked beforehand
//	Elasticsearch: rows with versions,      no            no      no         no    no           no
//	then the checkpoint by compare-and-set
//
// A sink without rollback is a versioned one, whose Try sends nothing to the server or
// writes rows that come anyway; or it queues its writes and tries them by looking at
// them. With Transactions its [Store].Refused are then those that it can see.
//
// [Store] is an empty store of one check, in which the checks
//
//   - open several instances of the sink, as several processes would;
//   - write through targets for the row types of this package ([Document], [Count],
//     [Amount], [Entry], [Keys], [Values]), and read what is stored around the sink;
//   - ask what a reader of the live model sees;
//   - read and overwrite the bytes of a stored checkpoint;
//   - make writes that are refused for their content;
//   - hold a checkpoint as a frozen process does.
//
// # What is checked
//
//   - acquire, load: terms grow by one, one at a time, and nothing else changes; Load
//     waits for a commit under way.
//   - commit, poison, try: all or nothing, whoever refuses and whenever; the class of
//     a refusal; a trial tells the same and writes nothing.
//   - fence, owners: a superseded owner's commit never shows, even if it began before
//     the takeover; of one sequence one commit happens; several owners at once.
//   - unknown, cancel: commits and other calls are cut off at random moments. The
//     effect is there exactly when the sequence is, and a retry applies it once.
//   - frozen: an owner that holds the checkpoint and does nothing is passed by.
//   - checkpoint: stored byte for byte; malformed ones and those of a newer release
//     are refused and left alone.
//   - first-commit, model: the place is made once, and a failed attempt leaves nothing.
//   - generations: Begin adds one beside the live one, their commits go on beside each
//     other, a takeover is one of all, and Discard takes one away. At a Switch a reader
//     sees all of one or all of the other, whenever it looks, and Load tells whether a
//     Switch whose answer was lost has happened.
//   - loader, sweeper: where a target is a [projector.Loader], that it loads what Put
//     would have put; where it is a [projector.Sweeper], that marks and sweeps leave
//     what was put under the mark. There is no feature for them: the target tells.
//   - add, put: compared with models in memory, at random and case by case.
//   - keys, values: nothing is mistaken for anything else; what the store can't hold
//     is refused as poison instead of being stored as something near it.
//
// Checks with chance in them log their seed; Subject.Seed repeats one.
//
// # Controls
//
// The suite's own tests break a sink in memory, one rule at a time, and want the
// rule's check to fail. With [Checks] and [Check.Faults] a sink's author can do the
// same: switch a guard off, and see that it is missed.
package sinktest
