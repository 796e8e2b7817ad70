// Package order compares BSON values as the server does: the order of its indexes, of
// sorts under the simple collation, and of the aggregation's $gt and its kin.
//
// Between types the order is: min key, undefined, null, numbers, string and symbol,
// document, array, binary, ObjectID, boolean, date, timestamp, regular expression,
// DBPointer, JavaScript, JavaScript with scope, max key. Within a type:
//
//	numbers       by their exact values, whatever the types; NaN is the lowest, and all
//	              NaN are equal, and so are 0 and -0
//	strings       by bytes, a NUL among them; a symbol equals the string of the same text
//	documents     element by element: type first, then name, then value; a prefix is lower
//	arrays        element by element, as values; that find's sort takes an array of a field
//	              for its least element is the sort's doing, and no array in an _id is such
//	binary        by length, then subtype, then bytes
//	regular exp.  by pattern, then options
//	DBPointer     by length of the namespace, then its bytes, then the ObjectID
//	with scope    by code, then scope
//
// All of it is checked on a real server by TestOrder in the package reconcile. An
// aggregation of 6.0.27 and 6.0.5 has an order of its own in two cases that hardly occur,
// in which Compare goes with the index: it overlooks a DBPointer's namespace but for the
// length, so that it holds different ones for equal, and it sorts documents that have a
// name twice in another way. Bounds of an index, such as find's min, agree with Compare
// there too. A NUL in a DBPointer's namespace, at which indexes take it to end, is not
// provided for.
package order
