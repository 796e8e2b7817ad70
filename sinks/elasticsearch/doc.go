// Package elasticsearch keeps read models in Elasticsearch, version 8, by any client of
// github.com/elastic/go-elasticsearch/v8.
//
//	type Entry struct {
//		SKU   string   `row:"sku"`
//		Title string   `row:"title"`
//		Tags  []string `row:"tags,json"`
//	}
//
//	var Shop = elasticsearch.Projection{
//		Name: "shop", Version: 1,
//		Bindings: elasticsearch.Bindings{
//			projector.Mirror("products", Product.Entry, elasticsearch.Index[Entry]{
//				Name:    "search",
//				Mapping: `{"title": {"type": "text"}, "tags": {"type": "keyword"}}`,
//			}),
//		},
//	}
//
//	runner, err := projector.New(db, elasticsearch.New(client), Shop, options)
//
// # For readers
//
// A model is read by aliases: shop-search above, which is a projection's name, a hyphen and
// a target's name ([Sink.Alias]); of a target with routes also orders-lines-eu. They are
// made with the model's first commit. A rebuild fills other indices, and at its end one
// request moves all aliases of the model: a search sees the old model or the new one.
// Scrolls and points in time go on in the old one, until it is discarded. Name the alias,
// never an index, whose name changes. Aliases that you add to such an index, with a filter
// say, move along.
//
// A search sees what the last refresh has seen: by default that is every second, though an
// index that nobody has searched for 30 s waits for the next search. [Sink.Refresh] refreshes
// a model at once, for a test or after WaitFor. Getting a document by its id needs none.
//
// The alias must not be written to by anybody else: versions decide, and a write without
// one begins to count anew.
//
// # Where things are
//
// The indices of generation 1 of the projection shop have names that begin with shop-g1-
// and end with twelve characters by chance, so that no index ever has the name of another;
// [Prefix] puts something before all names. Each has an alias of its own, the index's name
// and -write, which the sink writes to: with require_alias, so that a write to an index that
// somebody has removed fails, instead of making one with a guessed mapping. (For a deletion
// the server makes one all the same, by the alias's name. The answer tells, and the sink
// removes it and fails.) -new and .served-n are the sink's aliases too, see below. Mappings
// carry the projection in _meta; an index of such a name without it is never touched.
//
// Checkpoints are in tidemark-checkpoints, a document per projection, with an entry for each
// generation: committed_at is the time of the last commit, body has the position.
//
// The user needs: on these indices create_index, delete_index, manage, view_index_metadata,
// index, delete and read. Nothing of x-pack, ingest, scripts or delete-by-query is used, nor
// GET /; where security is on, the client brings the API key or the password.
//
// # Writing
//
// [Index] is the target of the forms Mirror, Upsert and Refresh, and of handlers of the form On. A
// Rollup does not compile with it, see below. An index is made with dynamic: strict, the
// mapping of every column, index.gc_deletes of 1h, and with what must not come from a template:
// translog.durability request, and no pipelines.
//
// What a document is:
//
//	Mirror  id: the _id of the source's document, as by projector.KeyText
//	Upsert  id: the key columns with | between them (| and \ in a text have a \ before them); tm_owner
//	        has the _id of the source's document
//
// Ids over 512 bytes, the server's limit, become "sha256:" and a hash; a Mirror's document
// then has tm_owner too.
//
// What a field is, by its Go type, and how it is mapped unless Mapping says otherwise:
//
//	string             keyword, ignore_above 8191   valid UTF-8, else refused
//	bool               boolean
//	int…, uint8…32     long
//	float32, float64   double                       NaN and ±Infinity are refused
//	time.Time          date                         2026-11-29T12:00:00.000Z; years 0 to 9999, else refused
//	[]byte             binary                       base64; nil is empty, not null
//	bson.ObjectID      keyword                      24 hex digits
//	bson.Decimal128    keyword                      a text, so exact; map it as double or scaled_float to sort by it
//	option json        object, enabled: false       JSON, see docs/types.md; kept, but not searched until mapped
//	pointers           the same                     null for nil
//
// What is refused, here or by the server, is a [DocumentError] that names the document. The
// other documents of its batch are written; the projection stops before that change.
//
// With Routes a target has several indices, and each row says which one it belongs to. Only
// the row knows: a removal by the document's _id does not, nor does a row that has moved
// say from where. So a row that is written to one route is deleted from all others,
// and a removal goes to all, with the same version: a late write to a route that the row has
// left is refused there. That costs a deletion per row and further route, which the server
// remembers for index.gc_deletes; few routes, then, or one index and a field. While a shadow
// rebuild fills them, such indices have a gc_deletes of 60 s (unless Settings says
// something), and the hour from just before the switch.
//
// # Bulk requests
//
// A commit's documents go in bulk requests of up to 6,000 documents or about 8 MB, two at
// a time; a document's id decides which lane it takes, so its writes stay in order. Of several
// writes to a document in one commit the last is sent. The answer is read item by item:
//
//	409 version conflict     success: the index has that change, or a later one
//	404 of a deletion        success: it was not there
//	429, 502, 503, 504       sent again, these items alone, with growing pauses, until the
//	                         commit's time is over; Status is Retrying meanwhile
//	413                      of the request: sent in halves
//	400                      poison: a DocumentError
//	404 of an index, 401, 403  fatal: to be put right by somebody
//
// More than 32 MB of encoded documents are sent before the handler is done, so that memory
// stays bounded.
//
// # What exactly once means here
//
// There are no transactions. A commit sends the documents, and then stores the checkpoint;
// between the two a process can die. What makes up for it is that every write, deletions
// too, carries the version of its change (its cluster time) by external_gte: the server
// keeps the highest. So:
//
//  1. The checkpoint is never ahead of the documents: it is sent when every item of every
//     request has been acknowledged.
//  2. Documents may be ahead of the checkpoint, for as long as a batch that was cut off
//     takes to be applied again. Then the same changes come again, in other batches
//     perhaps. Those that are there already change nothing, by their versions; in the end
//     each document is what its last change made of it.
//  3. Adding can't be done like that: an increment has no version that would tell whether
//     it is in. Hence no Rollup.
//  4. Two changes in one source transaction have one version. Within a batch the later wins
//     before anything is sent; batches are cut between transactions. (One over
//     Options.TransactionBytes is cut in parts: readers may see an earlier part again
//     during a replay, though not after it. Where documents swap the keys of an Upsert in
//     it, a later part looks at the rows that it is to remove, and leaves alone those
//     that another document has put with the same version.)
//
// And of checkpoints, which are all in one document that is only ever stored by
// compare-and-set, on the sequence number that it was read with:
//
//  5. A commit reads it first, and compares term, owner and sequence; what it stores at the
//     end is refused if anybody has written meanwhile. Then it reads again: another term or
//     sequence is an error that wraps projector.ErrFenced; otherwise it was another
//     generation's commit, or a Load, and it is stored again on top of that. An attempt's
//     name is in the entry, so a request that the client has repeated by itself is known.
//  6. Acquire raises the term of all generations in one write.
//  7. Load writes, too. What it has read is thus what the cluster agrees on, not what a
//     primary believes that has been cut off; and an attempt to commit that is on its way
//     has a sequence number that is no longer the document's.
//
// Where a process can die, and what is then true:
//
//	before a bulk request        nothing has happened.
//	among bulk requests          some documents are ahead of the checkpoint: point 2.
//	before the checkpoint        all of the batch's documents are: point 2.
//	after the checkpoint was     Load tells which. If it is stored, so are the documents.
//	sent, without an answer
//	in the first commit, or      new indices that nothing refers to, and that the next attempt
//	in one that clears           does not use; they go with their generation. Readers see
//	                             what they saw before.
//	in Switch, Discard           see below.
//	not dead but frozen          see the next part.
//
// # Late writes
//
// A process that was frozen may wake up and go on sending. Before a bulk request it looks at
// the checkpoint, if the last look is over 250 ms old, and stops if it has been superseded.
// A request that was on its way is carried out, and does no harm as long as the server
// remembers what it is late for:
//
//   - A document that is there has its version, for good.
//   - A deletion is remembered for index.gc_deletes: 1 h in indices that the sink makes (with
//     routes 60 s while a rebuild fills them), 60 s by the server's default. After that, a
//     late write makes the document again, until its next change or a rebuild.
//   - A restart of the node forgets deletions that were flushed (seen with 8.19).
//   - No two indices ever have one name, nor do their aliases: a late write to a generation
//     that is discarded finds no index. (A late deletion makes an empty one by the name of
//     the alias, which whoever has sent it removes; it stays where that one has died.)
//
// # Generations
//
// The projection's document says which generation is live, and with which indices. Switch
// stores there that the new one is, and that the aliases have to follow; that write is what
// decides. Then it moves the aliases by one request, and stores that this is done. Whoever
// reads the document in between, to take over, to load or to commit, moves them first. So
// nobody commits while the aliases are elsewhere than the document says, and a process that
// dies in between only delays what readers see. Before anything, the new indices are
// refreshed.
//
// A request to move the aliases that is late by a whole switch is refused: it removes an
// alias that only the indices of the switch before have, served-n with a number that grows
// (or -new, where there was none before), which must be there. Whoever moves them reads first
// where they are, and then the document.
//
// Clear, for a rebuild in place of the live model, makes new indices, and they take the
// place of the old ones by the same write as the checkpoint. Discard first removes the
// generation from the document, with its indices noted as to be deleted, and then deletes
// them.
//
// # Lost and restored checkpoints
//
// Where the projection's document is gone, Acquire begins with an empty generation 1, in
// new indices; what an earlier model has written is not looked at, since its documents and
// deletions may have later versions. Readers see that model until the new one's first
// commit. Its indices are removed when a generation of the same number is discarded, or
// by you. A commit that was under way has been fenced.
//
// Where an earlier state of the document was put back, Acquire moves the aliases to what
// is live by it. If its indices are not there any more, the aliases stay, and commits fail
// until the model is rebuilt.
//
// # Limits
//
// Mappings can't be changed under a model: raise Version, and it is rebuilt. A document is
// sent in one request: http.max_content_length, 100 MB by default. A model with more
// than a few targets and routes has as many shards, in two generations during a rebuild.
package elasticsearch
