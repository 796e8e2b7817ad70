package mongodb

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Create makes the collection with its indexes, in the transaction. A collection that
// is there already, prepared by someone with a validator or options of their own, is
// taken if it is fit: no view, time series or capped collection, and no collation,
// under which keys that differ could be one. In a model's first commit it must be
// empty as well, since its rows would be counted twice. Its missing indexes are built
// at once, outside of the transaction.
//
// In a generation that is being built, a collection that is not there takes over what was
// added to the live one of its name: indexes, validation, images. Of the indexes those,
// with the first write or the commit, on whose keys, and under whose name, the projection
// itself has made none.
func (c *TxCollection) Create(ctx context.Context, indexes ...mongo.IndexModel) error {
	switch {
	case c.tx.closed:
		return errOver
	case c.fault != nil:
		return c.tx.fail(c.fault)
	}
	c.use()
	if h := c.tx.made[c.Name()]; h != nil { // which nobody outside of the transaction can see
		_, err := statement(ctx, c, func(ctx context.Context) (struct{}, error) { return struct{}{}, c.index(ctx, indexes, h) })
		return err
	}
	// listCollections is not allowed in a transaction.
	there, err := c.examine(c.tx.base)
	switch {
	case err != nil:
		return err
	case there && c.tx.first:
		return c.mustBeEmpty(c.tx.base, indexes)
	case there:
		return c.index(c.tx.base, indexes, nil)
	}
	h, err := c.inherit(c.tx.base)
	if err != nil {
		return failed(fmt.Sprintf("look for what collection %q takes over", c.Name()), err)
	}
	_, err = statement(ctx, c, func(ctx context.Context) (struct{}, error) {
		err := c.tx.sink.db.CreateCollection(ctx, c.Name(), h.options)
		if err == nil {
			err = c.index(ctx, indexes, h)
		}
		return struct{}{}, err
	})
	if err != nil {
		return fmt.Errorf("tidemark/mongodb: create collection %q: %w", c.Name(), err)
	}
	c.tx.made[c.Name()] = h
	return nil
}

// index makes indexes, and notes them in what the collection takes over, if there is
// such.
func (c *TxCollection) index(ctx context.Context, indexes []mongo.IndexModel, h *inheritance) error {
	if len(indexes) == 0 {
		return nil
	}
	names, err := c.coll.Indexes().CreateMany(ctx, indexes)
	if err != nil {
		return fmt.Errorf("tidemark/mongodb: create the indexes of collection %q: %w", c.Name(), err)
	}
	if h == nil {
		return nil
	}
	return h.without(indexes, names)
}

// examine reports whether the collection exists, and an error where it is unfit.
func (c *TxCollection) examine(ctx context.Context) (there bool, err error) {
	specs, err := c.tx.sink.db.ListCollections(ctx, bson.D{{Key: "name", Value: c.Name()}})
	if err != nil {
		return false, failed(fmt.Sprintf("look for collection %q", c.Name()), err)
	}
	var list []struct {
		Type    string   `bson:"type"`
		Options bson.Raw `bson:"options"`
	}
	if err := specs.All(ctx, &list); err != nil {
		return false, failed(fmt.Sprintf("look for collection %q", c.Name()), err)
	}
	if len(list) == 0 {
		return false, nil
	}
	var faults []string
	if list[0].Type != "collection" {
		faults = append(faults, "it is a "+list[0].Type)
	}
	if capped, ok := list[0].Options.Lookup("capped").BooleanOK(); ok && capped {
		faults = append(faults, "it is capped, so rows would vanish")
	}
	if locale, ok := list[0].Options.Lookup("collation", "locale").StringValueOK(); ok && locale != "simple" {
		faults = append(faults, "it has the collation "+locale+", under which keys that differ can be one")
	}
	if len(faults) > 0 {
		return true, &setupError{fmt.Errorf("tidemark/mongodb: collection %q can't hold a model: %s; drop it, it will be created",
			c.Name(), strings.Join(faults, "; "))}
	}
	return true, nil
}

func (c *TxCollection) mustBeEmpty(ctx context.Context, indexes []mongo.IndexModel) error {
	if err := c.index(ctx, indexes, nil); err != nil {
		return err
	}
	// Read outside of the transaction: its lock on the collection would stand in the way
	// of another index, which Setup may want.
	err := c.coll.FindOne(ctx, bson.D{}).Err()
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return nil
	case err != nil:
		return failed(fmt.Sprintf("look into collection %q", c.Name()), err)
	}
	return &setupError{fmt.Errorf("tidemark/mongodb: collection %q has documents, but the model has no checkpoint that tells what they contain; "+
		"drop the collection to start over", c.Name())}
}

// Create implements projector.Model, by [TxCollection.Create].
func (c Collection[R]) Create(ctx context.Context, tx *Tx) error {
	p, err := c.plan()
	if err != nil {
		return fmt.Errorf("tidemark/mongodb: %w", err)
	}
	if p.kind == keyed {
		return tx.Collection(c.Name).Create(ctx, mongo.IndexModel{Keys: bson.D{{Key: ownerField, Value: 1}}})
	}
	return tx.Collection(c.Name).Create(ctx)
}

// Clear implements projector.Model. It deletes every document, in the transaction.
func (c Collection[R]) Clear(ctx context.Context, tx *Tx) error {
	if _, err := c.plan(); err != nil {
		return fmt.Errorf("tidemark/mongodb: %w", err)
	}
	_, err := tx.Collection(c.Name).DeleteMany(ctx, bson.D{})
	return err
}

// Empty implements projector.Emptier: a transaction that deletes some hundred thousand rows is
// more than a small server's cache takes.
func (c Collection[R]) Empty(ctx context.Context, tx *Tx, limit int) (int, error) {
	if _, err := c.plan(); err != nil {
		return 0, fmt.Errorf("tidemark/mongodb: %w", err)
	}
	return tx.remove(ctx, c.Name, bson.D{}, limit)
}
