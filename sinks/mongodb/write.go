package mongodb

import (
	"context"
	"fmt"
	"math/big"
	"reflect"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/tidemark-go/tidemark/internal/order"
	"github.com/tidemark-go/tidemark/internal/row"
	"github.com/tidemark-go/tidemark/projector"
)

// bulk sends few and large statements.
func (c *TxCollection) bulk(ctx context.Context, models []mongo.WriteModel) error {
	if len(models) == 0 {
		return nil
	}
	_, err := c.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	return err
}

// adder writes the deltas of one Add.
type adder struct {
	p       *plan
	d       *row.Deltas
	coll    *TxCollection
	emptied []bson.RawValue // the _ids of rows that may have lost their last contribution
}

// add makes an upsert of each delta, from the last key to the first. The order is of no
// matter but for the time: an upsert whose _id was deleted lately looks for it in the index
// and then steps over every deleted entry that follows, so that putting back n
// neighbours upwards takes n² steps (seen on 6.0: twenty times as long for 5,000), while
// downwards the next entry is one just put.
func (a *adder) add(ctx context.Context) error {
	b := a.coll.batch("update")
	return b.finish(ctx, a.addTo(ctx, b))
}

func (a *adder) addTo(ctx context.Context, b *batch) (err error) {
	for i := a.d.Len() - 1; i >= 0; i-- {
		b.begin()
		b.buf = bsoncore.AppendHeader(b.buf, bsoncore.TypeEmbeddedDocument, "q")
		start := len(b.buf)
		if b.buf, err = appendKey(b.buf, a.p.schema, a.d.Row(i)); err != nil {
			return err
		}
		if a.d.Count(i) <= 0 {
			a.emptied = append(a.emptied, copied(bson.Raw(b.buf[start:]).Lookup("_id")))
		}
		b.buf = bsoncore.AppendHeader(b.buf, bsoncore.TypeEmbeddedDocument, "u")
		if b.buf, err = a.appendUpdate(b.buf, i); err != nil {
			return err
		}
		b.buf = bsoncore.AppendBooleanElement(b.buf, "upsert", true)
		if err := b.end(ctx); err != nil {
			return err
		}
	}
	return nil
}

// appendKey appends {_id: {…}} of a row's keys.
func appendKey(dst []byte, s *row.Schema, r reflect.Value) (_ []byte, err error) {
	at, dst := bsoncore.AppendDocumentStart(dst)
	id, dst := bsoncore.AppendDocumentElementStart(dst, "_id")
	for i := range s.Keys {
		if dst, err = appendField(dst, &s.Keys[i], r); err != nil {
			return dst, err
		}
	}
	if dst, err = bsoncore.AppendDocumentEnd(dst, id); err != nil {
		return dst, err
	}
	return bsoncore.AppendDocumentEnd(dst, at)
}

func (a *adder) appendUpdate(dst []byte, i int) (_ []byte, err error) {
	at, dst := bsoncore.AppendDocumentStart(dst)
	inc, dst := bsoncore.AppendDocumentElementStart(dst, "$inc")
	for n := range a.p.schema.Sums {
		f := &a.p.schema.Sums[n]
		if f.Kind == row.Int {
			dst = bsoncore.AppendInt64Element(dst, f.Name, a.d.Int(i, n))
			continue
		}
		coefficient, exponent := a.d.Decimal(i, n)
		if dst, err = appendSum(dst, f.Name, coefficient, exponent); err != nil {
			return dst, err
		}
	}
	dst = bsoncore.AppendInt64Element(dst, row.Contributions, a.d.Count(i))
	if dst, err = bsoncore.AppendDocumentEnd(dst, inc); err != nil {
		return dst, err
	}
	return bsoncore.AppendDocumentEnd(dst, at)
}

// checkExact reads the decimal sums that are about to change and adds up itself: the
// server rounds to 34 digits, in silence. What it will compute is exact if the exact
// sum fits, and the transaction's snapshot keeps the sums as they are until then.
func (a *adder) checkExact(ctx context.Context) error {
	if !a.p.decimal {
		return nil
	}
	at := make(map[string]int, a.d.Len())
	ids := make([]bson.RawValue, a.d.Len())
	for i := range ids {
		key, err := appendKey(nil, a.p.schema, a.d.Row(i))
		if err != nil {
			return err
		}
		ids[i] = bson.Raw(key).Lookup("_id")
		at[string(ids[i].Value)] = i
	}
	fields := bson.D{}
	for n := range a.p.schema.Sums {
		if f := &a.p.schema.Sums[n]; f.Kind == row.Decimal {
			fields = append(fields, bson.E{Key: f.Name, Value: 1})
		}
	}
	return a.coll.each(ctx, "_id", ids, nil, options.Find().SetProjection(fields), func(r bson.Raw) error {
		i, ok := at[string(r.Lookup("_id").Value)]
		if !ok {
			return nil
		}
		for n := range a.p.schema.Sums {
			f := &a.p.schema.Sums[n]
			d, ok := r.Lookup(f.Name).Decimal128OK()
			if f.Kind != row.Decimal || !ok {
				continue
			}
			if coefficient, exponent := a.d.Decimal(i, n); !exact(d, coefficient, exponent) {
				return fmt.Errorf("tidemark/mongodb: collection %q, row %s, field %q: %w", a.coll.Name(), textOf(r.Lookup("_id")), f.Name, errInexact)
			}
		}
		return nil
	})
}

// exact reports whether stored + coefficient × 10^exponent is a Decimal128.
func exact(stored bson.Decimal128, coefficient *big.Int, exponent int) bool {
	c, exp, err := stored.BigInt()
	if err != nil {
		return false // NaN or infinite, which nothing here has written
	}
	if c.Sign() == 0 || coefficient.Sign() == 0 {
		return true
	}
	sum, d := c, new(big.Int).Set(coefficient)
	if low := min(exp, exponent); low < exp {
		sum.Mul(sum, power(exp-low))
	} else {
		d.Mul(d, power(exponent-low))
	}
	_, ok := bson.ParseDecimal128FromBigInt(sum.Add(sum, d), min(exp, exponent))
	return ok
}

func power(n int) *big.Int { return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(n)), nil) }

// removeEmptied removes rows that have lost their last contribution. One that has
// fewer than none, or none and a sum that is left, is a contradiction.
func (a *adder) removeEmptied(ctx context.Context) error {
	if len(a.emptied) == 0 {
		return nil
	}
	var gone []bson.RawValue
	emptied := bson.E{Key: row.Contributions, Value: bson.D{{Key: "$lte", Value: int64(0)}}}
	err := a.coll.each(ctx, "_id", a.emptied, bson.D{emptied}, options.Find(), func(r bson.Raw) error {
		clean := isZero(r.Lookup(row.Contributions))
		for n := range a.p.schema.Sums {
			clean = clean && isZero(r.Lookup(a.p.schema.Sums[n].Name))
		}
		id := r.Lookup("_id")
		if !clean {
			return &DriftError{Collection: a.coll.Name(), ID: textOf(id)}
		}
		gone = append(gone, copied(id))
		return nil
	})
	if err != nil {
		return err
	}
	return a.coll.bulk(ctx, deletions("_id", gone))
}

func isZero(v bson.RawValue) bool {
	if d, ok := v.Decimal128OK(); ok {
		c, _, err := d.BigInt()
		return err == nil && c.Sign() == 0
	}
	n, ok := v.AsInt64OK()
	return ok && n == 0
}

// putter writes the rows of one Put.
type putter[R any] struct {
	p    *plan
	coll *TxCollection
	mark int64 // of the rebuild in place under way, or 0
}

func (w *putter[R]) write(ctx context.Context, remove, put []projector.Row[R]) error {
	var kept []int
	var err error
	if w.p.kind == mirrored {
		kept, err = w.removeMirrored(ctx, remove, put)
	} else {
		kept, err = w.removeKeyed(ctx, remove, put)
	}
	if err != nil || len(kept) == 0 {
		return err
	}
	b := w.coll.batch("update")
	return b.finish(ctx, w.putTo(ctx, b, put, kept))
}

// removeKeyed removes rows with keys of their own, and gives the rows to put.
func (w *putter[R]) removeKeyed(ctx context.Context, remove, put []projector.Row[R]) (kept []int, err error) {
	var whole []bson.RawValue
	single := make([]projector.Row[R], 0, len(remove))
	for _, r := range remove {
		if r.Row == nil {
			whole = append(whole, r.Owner)
		} else {
			single = append(single, r)
		}
	}
	removed, kept := row.Settle(len(single), len(put), func(dst []byte, isPut bool, i int) []byte {
		rows := single
		if isPut {
			rows = put
		}
		return w.p.schema.AppendKey(dst, reflect.ValueOf(rows[i].Row).Elem())
	})
	if len(removed) > 0 {
		b := w.coll.batch("delete")
		if err := b.finish(ctx, w.removeFrom(ctx, b, single, removed)); err != nil {
			return nil, err
		}
	}
	return kept, w.coll.bulk(ctx, deletions(ownerField, whole))
}

// removeFrom deletes rows by their keys, where they still belong to the owner.
func (w *putter[R]) removeFrom(ctx context.Context, b *batch, rows []projector.Row[R], removed []int) (err error) {
	for _, i := range removed {
		r := &rows[i]
		b.begin()
		b.buf = bsoncore.AppendHeader(b.buf, bsoncore.TypeEmbeddedDocument, "q")
		start := len(b.buf)
		if b.buf, err = appendKey(b.buf, w.p.schema, reflect.ValueOf(r.Row).Elem()); err != nil {
			return rowError(r.Owner, err)
		}
		b.buf = appendValue(b.buf[:len(b.buf)-1], ownerField, r.Owner, true)          // before the closing zero
		if b.buf, err = bsoncore.AppendDocumentEnd(b.buf, int32(start)); err != nil { //nolint:gosec // far below 2 GB
			return rowError(r.Owner, err)
		}
		b.buf = bsoncore.AppendInt32Element(b.buf, "limit", 1)
		if err := b.end(ctx); err != nil {
			return err
		}
	}
	return nil
}

// removeMirrored removes rows whose _id is their owner's, and gives the rows to put.
// Removals and puts are matched by the text form of the _id, in which the numbers that
// the server takes for equal are equal.
func (w *putter[R]) removeMirrored(ctx context.Context, remove, put []projector.Row[R]) (kept []int, err error) {
	removed, kept := row.Settle(len(remove), len(put), func(dst []byte, isPut bool, i int) []byte {
		if isPut {
			return append(dst, projector.KeyText(put[i].Owner)...)
		}
		return append(dst, projector.KeyText(remove[i].Owner)...)
	})
	owners := make([]bson.RawValue, len(removed))
	for n, i := range removed {
		owners[n] = remove[i].Owner
	}
	return kept, w.coll.bulk(ctx, deletions("_id", owners))
}

// putTo replaces or inserts rows. A replacement has no _id, so that the server takes
// the filter's, or leaves the one that is there: 1 and 1.0 are one _id. They go from the
// last to the first, see adder.add.
func (w *putter[R]) putTo(ctx context.Context, b *batch, put []projector.Row[R], kept []int) error {
	for _, i := range slices.Backward(kept) {
		r := &put[i]
		b.begin()
		var err error
		b.buf = bsoncore.AppendHeader(b.buf, bsoncore.TypeEmbeddedDocument, "q")
		if b.buf, err = w.appendFilter(b.buf, r); err != nil {
			return rowError(r.Owner, err)
		}
		u, buf := bsoncore.AppendDocumentElementStart(b.buf, "u")
		if b.buf, err = w.appendFields(buf, r); err == nil {
			b.buf, err = bsoncore.AppendDocumentEnd(b.buf, u)
		}
		if err != nil {
			return rowError(r.Owner, err)
		}
		b.buf = bsoncore.AppendBooleanElement(b.buf, "upsert", true)
		if err := b.end(ctx); err != nil {
			return err
		}
	}
	return nil
}

// appendFilter appends {_id: …} of a row.
func (w *putter[R]) appendFilter(dst []byte, r *projector.Row[R]) ([]byte, error) {
	if w.p.kind == keyed {
		return appendKey(dst, w.p.schema, reflect.ValueOf(r.Row).Elem())
	}
	at, dst := bsoncore.AppendDocumentStart(dst)
	return bsoncore.AppendDocumentEnd(appendValue(dst, "_id", r.Owner, true), at)
}

// appendFields appends what a row has beside its _id.
func (w *putter[R]) appendFields(dst []byte, r *projector.Row[R]) (_ []byte, err error) {
	value := reflect.ValueOf(r.Row).Elem()
	for i := range w.p.schema.Plain {
		if dst, err = appendField(dst, &w.p.schema.Plain[i], value); err != nil {
			return dst, err
		}
	}
	if w.p.kind == keyed {
		dst = appendValue(dst, ownerField, r.Owner, false)
	}
	if w.mark != 0 {
		dst = bsoncore.AppendInt64Element(dst, markField, w.mark)
	}
	return dst, nil
}

// load inserts the rows of a Mirror.
func (w *putter[R]) load(ctx context.Context, rows []projector.Row[R]) error {
	if len(rows) == 0 {
		return nil
	}
	b := w.coll.batch("insert")
	return b.finish(ctx, w.loadTo(ctx, b, rows))
}

func (w *putter[R]) loadTo(ctx context.Context, b *batch, rows []projector.Row[R]) (err error) {
	for i := range rows {
		r := &rows[i]
		b.begin()
		b.buf = appendValue(b.buf, "_id", r.Owner, false)
		if b.buf, err = w.appendFields(b.buf, r); err != nil {
			return rowError(r.Owner, err)
		}
		if err := b.end(ctx); err != nil {
			return err
		}
	}
	return nil
}

func rowError(owner bson.RawValue, err error) error {
	return fmt.Errorf("%w (document %s)", err, projector.KeyText(owner))
}

// appendValue appends any value; in a filter, documents are wrapped in $eq, or one
// whose first name begins with a dollar would be taken for an operator.
func appendValue(dst []byte, name string, v bson.RawValue, filter bool) []byte {
	value := bsoncore.Value{Type: bsoncore.Type(v.Type), Data: v.Value}
	if !filter || v.Type != bson.TypeEmbeddedDocument && v.Type != bson.TypeRegex {
		return bsoncore.AppendValueElement(dst, name, value)
	}
	at, dst := bsoncore.AppendDocumentElementStart(dst, name)
	dst, _ = bsoncore.AppendDocumentEnd(bsoncore.AppendValueElement(dst, "$eq", value), at)
	return dst
}

func in(field string, list []bson.RawValue) bson.D {
	return bson.D{{Key: field, Value: bson.D{{Key: "$in", Value: list}}}}
}

// deletions deletes what has one of these values in field.
func deletions(field string, values []bson.RawValue) (models []mongo.WriteModel) {
	for _, list := range order.In(values) {
		models = append(models, mongo.NewDeleteManyModel().SetFilter(in(field, list)))
	}
	return models
}

// findBatch is how many documents a reply may have.
const findBatch = 10_000

// each finds what has one of these values in field, and hands it to f, which must not
// keep it.
func (c *TxCollection) each(ctx context.Context, field string, values []bson.RawValue, also bson.D, o *options.FindOptionsBuilder, f func(bson.Raw) error) error {
	for _, list := range order.In(values) {
		if err := c.find(ctx, append(in(field, list), also...), o.SetBatchSize(findBatch), f); err != nil {
			return err
		}
	}
	return nil
}

// find hands what matches to f, which must not keep it.
func (c *TxCollection) find(ctx context.Context, filter bson.D, o *options.FindOptionsBuilder, f func(bson.Raw) error) error {
	cur, err := c.Find(ctx, filter, o)
	if err != nil {
		return err
	}
	bounded, cancel := c.tx.bound(ctx)
	defer cancel()
	for cur.Next(bounded) {
		if err = f(cur.Current); err != nil {
			break
		}
	}
	if err == nil {
		err = c.tx.fail(cur.Err())
	}
	_ = cur.Close(bounded)
	return err
}

func copied(v bson.RawValue) bson.RawValue {
	return bson.RawValue{Type: v.Type, Value: append([]byte(nil), v.Value...)}
}
