package mongodb

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// inheritance is what a collection of a new generation takes over from the live one's:
// what people have added there by hand and expect to find after the switch.
type inheritance struct {
	options *options.CreateCollectionOptionsBuilder
	indexes []bson.Raw // that are still to be made; as listIndexes gives them, which is as createIndexes takes them
}

// inherit looks for it, outside of the transaction.
func (c *TxCollection) inherit(ctx context.Context) (*inheritance, error) {
	h := &inheritance{options: options.CreateCollection()}
	if !c.tx.building || c.short == "" {
		return h, nil
	}
	var live struct {
		Place string `bson:"_id"`
	}
	err := c.tx.sink.checkpoints.FindOne(ctx, append(ofProjection(c.tx.projection), onlyLive)).Decode(&live)
	if err != nil || live.Place == c.tx.place {
		return h, ignore(err, mongo.ErrNoDocuments)
	}
	from := c.tx.sink.db.Collection(live.Place + "." + c.short)
	specs, err := c.tx.sink.db.ListCollectionSpecifications(ctx, bson.D{{Key: "name", Value: from.Name()}, {Key: "type", Value: "collection"}})
	if err != nil || len(specs) == 0 {
		return h, err
	}
	h.takeOptions(specs[0].Options)
	cur, err := from.Indexes().List(ctx)
	if err != nil {
		return h, err
	}
	if err := cur.All(ctx, &h.indexes); err != nil {
		return h, err
	}
	return h, h.without([]mongo.IndexModel{{Keys: bson.D{{Key: "_id", Value: 1}}}}, nil)
}

// ready prepares a collection of the model for a write. Where that is what makes it, it
// takes over what Create would have; and what it is to take over is made now: on one that
// has documents the server makes no index in a transaction.
func (c *TxCollection) ready(ctx context.Context) error {
	if h := c.tx.made[c.Name()]; h != nil {
		return c.indexInherited(ctx, h)
	}
	if !c.tx.building || c.short == "" || c.tx.sess.recorded[c.short] || c.tx.there[c.short] {
		return nil
	}
	there, err := c.examine(c.tx.base)
	if err != nil {
		return err
	}
	if !there {
		h, err := c.inherit(c.tx.base)
		if err == nil {
			err = c.tx.sink.db.CreateCollection(ctx, c.Name(), h.options)
		}
		if err != nil {
			return failed(fmt.Sprintf("create collection %q", c.Name()), err)
		}
		c.tx.made[c.Name()] = h
		return c.indexInherited(ctx, h)
	}
	c.tx.there[c.short] = true
	return nil
}

func (h *inheritance) takeOptions(o bson.Raw) {
	if v, ok := o.Lookup("validator").DocumentOK(); ok {
		h.options.SetValidator(v)
	}
	if v, ok := o.Lookup("validationLevel").StringValueOK(); ok {
		h.options.SetValidationLevel(v)
	}
	if v, ok := o.Lookup("validationAction").StringValueOK(); ok {
		h.options.SetValidationAction(v)
	}
	if v, ok := o.Lookup("changeStreamPreAndPostImages").DocumentOK(); ok {
		h.options.SetChangeStreamPreAndPostImages(v)
	}
}

// without takes out of it what the projection makes itself: an index on the same keys, or
// of the same name.
func (h *inheritance) without(made []mongo.IndexModel, names []string) error {
	has := map[string]bool{}
	for _, m := range made {
		keys, err := bson.Marshal(m.Keys)
		if err != nil {
			return err
		}
		has[keyText(keys)] = true
	}
	h.indexes = slices.DeleteFunc(h.indexes, func(spec bson.Raw) bool {
		keys, _ := spec.Lookup("key").DocumentOK()
		name, _ := spec.Lookup("name").StringValueOK()
		return has[keyText(keys)] || slices.Contains(names, name)
	})
	return nil
}

// indexInherited makes the indexes that are taken over.
func (c *TxCollection) indexInherited(ctx context.Context, h *inheritance) error {
	if len(h.indexes) == 0 {
		return nil
	}
	err := c.tx.sink.db.RunCommand(ctx, bson.D{{Key: "createIndexes", Value: c.Name()}, {Key: "indexes", Value: h.indexes}}).Err()
	if err != nil {
		return fmt.Errorf("tidemark/mongodb: make the indexes of collection %q that the live generation's has: %w", c.Name(), err)
	}
	h.indexes = nil
	return nil
}

// inherit makes what is still to be taken over when the commit comes.
func (tx *Tx) inherit(ctx context.Context) error {
	for name, h := range tx.made {
		ctx, cancel := tx.bound(ctx)
		err := tx.collection(name).indexInherited(ctx, h)
		cancel()
		if err != nil {
			return tx.fail(err)
		}
	}
	return nil
}

// keyText is the keys of an index, in which numbers may have any type. A collection has one
// text index only, so all those are one.
func keyText(keys bson.Raw) (text string) {
	elements, _ := keys.Elements()
	for _, e := range elements {
		if kind, ok := e.Value().StringValueOK(); ok && kind == "text" {
			return kind
		}
		if n, ok := e.Value().AsInt64OK(); ok {
			text += fmt.Sprintf("%q:%d,", e.Key(), n)
		} else {
			text += fmt.Sprintf("%q:%s,", e.Key(), e.Value())
		}
	}
	return text
}
