package sinktest

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// The row types of the targets that a sink brings. Their columns are called like
// their fields in lower case, which is what most decoders expect by themselves.

// Count is a row of a Rollup.
type Count struct {
	Region string `row:"region,key"`
	Status string `row:"status,key"`
	N      int64  `row:"n,sum"`
	Total  int64  `row:"total,sum"`
}

// Amount is a row of a Rollup with an exact decimal sum.
type Amount struct {
	Shop  string          `row:"shop,key"`
	Total bson.Decimal128 `row:"total,sum"`
}

// Document is a row of a Mirror: its key is the document's _id.
type Document struct {
	Name string `row:"name"`
	N    int64  `row:"n"`
}

// Entry is a row of an Upsert, with a key of two columns.
type Entry struct {
	Shelf string `row:"shelf,key"`
	Slot  string `row:"slot,key"`
	Label string `row:"label"`
	Size  int64  `row:"size"`
}

// Keys is a row of an Upsert that has keys of every kind.
type Keys struct {
	Text     string        `row:"text,key"`
	Flag     bool          `row:"flag,key"`
	Int      int64         `row:"int,key"`
	Time     time.Time     `row:"time,key"`
	ObjectID bson.ObjectID `row:"objectid,key"`
	N        int64         `row:"n"`
}

// Word is a named string, which is stored like any other.
type Word string

// Values is a row of a Mirror that has values of every kind. Times have milliseconds,
// and a nil slice is as good as an empty one.
type Values struct {
	Text     string          `row:"text"`
	Word     Word            `row:"word"`
	Flag     bool            `row:"flag"`
	Int      int64           `row:"int"`
	Small    int8            `row:"small"`
	Unsigned uint32          `row:"unsigned"`
	Float    float64         `row:"float"`
	Time     time.Time       `row:"time"`
	Bytes    []byte          `row:"bytes"`
	ObjectID bson.ObjectID   `row:"objectid"`
	Decimal  bson.Decimal128 `row:"decimal"`
	JSON     map[string]any  `row:"json,json"`

	MaybeText     *string          `row:"maybetext"`
	MaybeFlag     *bool            `row:"maybeflag"`
	MaybeInt      *int64           `row:"maybeint"`
	MaybeFloat    *float64         `row:"maybefloat"`
	MaybeTime     *time.Time       `row:"maybetime"`
	MaybeBytes    *[]byte          `row:"maybebytes"`
	MaybeObjectID *bson.ObjectID   `row:"maybeobjectid"`
	MaybeDecimal  *bson.Decimal128 `row:"maybedecimal"`
}
