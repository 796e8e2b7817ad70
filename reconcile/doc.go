// Package reconcile rebuilds a read model from the source's documents, while both are in
// use: when a projection is new, when the source's history was lost, when the code of the
// projection has changed, or by hand.
//
//	runner, err := projector.New(db, sink, projection, projector.Options{Reconcile: reconcile.Snapshot{}})
//
// The documents are read in chunks by order of _id, each as of the cluster time that the
// model stands at, so nothing is locked and nothing is written to the source. What is
// right about it is argued in the package doc of projector; this package reads.
package reconcile
