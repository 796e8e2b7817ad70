package projector

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/tidemark-go/tidemark/internal/fault"
)

// source is the database that is followed.
type source struct {
	db      *mongo.Database
	plan    *plan
	split   atomic.Bool   // the stream asks for large events in pieces
	silence time.Duration // Options.SilenceTimeout
}

// preflight looks at the source before anything is read from it: that it has change
// streams, that every collection is one that can be followed and keeps the images
// that its bindings need, and that we may open a stream. All faults come at once.
// The library never switches images on by itself: they cost the source disk space.
//
// A rebuild takes a collection that is missing for an empty one, since it may just have
// been dropped.
func (s *source) preflight(ctx context.Context, rebuild bool) (Watch, error) {
	if err := s.db.Client().Ping(ctx, readpref.Primary()); err != nil {
		return Watch{}, err
	}
	var hello struct {
		SetName string `bson:"setName"`
		Msg     string `bson:"msg"`
		Wire    int    `bson:"maxWireVersion"`
	}
	if err := s.db.RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&hello); err != nil {
		return Watch{}, err
	}
	var faults []error
	switch {
	case hello.SetName == "" && hello.Msg != "isdbgrid":
		faults = append(faults, errors.New("the source is a single mongod, which has no change streams; make it a replica set of one: start it with --replSet rs0 and run rs.initiate()"))
	case hello.Wire < 17:
		faults = append(faults, errors.New("the source is older than MongoDB 6.0, which can't give pre- and post-images"))
	}
	watch := Watch{Database: s.db.Name()}
	infos, err := s.collections(ctx)
	switch {
	case err == nil:
		for _, c := range s.plan.collections {
			info := infos[c.name]
			if f := info.fault(c); f != nil && (!rebuild || info.Name != "") {
				faults = append(faults, f)
			}
			if l := info.Options.Collation.Locale; l != "" && l != "simple" && rebuild {
				faults = append(faults, fmt.Errorf("collection %q has the default collation %q, in which its _id have another order than a rebuild needs; copy it into a collection without one", c.name, l))
			}
			w := Watched{Name: c.name, UUID: info.Info.UUID, Before: c.images.before, After: c.images.after}
			for _, b := range c.bindings {
				w.Bindings = append(w.Bindings, s.plan.bindings[b].watched)
			}
			watch.Collections = append(watch.Collections, w)
		}
	case isUnauthorized(err):
		faults = append(faults, s.missingRight(err))
	default:
		return Watch{}, err
	}
	if len(faults) == 0 {
		if err := s.probe(ctx); isUnauthorized(err) {
			faults = append(faults, s.missingRight(err))
		} else if err != nil {
			return Watch{}, err
		}
	}
	if len(faults) > 0 {
		return watch, &ConfigError{Projection: s.plan.projection, Faults: faults}
	}
	watch.ReplicaSet, err = s.replicaSet(ctx)
	return watch, err
}

func (s *source) missingRight(err error) error {
	return fmt.Errorf("the user may not follow database %[1]q; grant the role read on it: db.grantRolesToUser(\"<user>\", [{role: \"read\", db: \"%[1]s\"}]): %[2]w", s.db.Name(), err)
}

// collectionInfo is an entry of listCollections.
type collectionInfo struct {
	Name string `bson:"name"`
	Type string `bson:"type"`
	Info struct {
		UUID bson.Binary `bson:"uuid"`
	} `bson:"info"`
	Options struct {
		Images struct {
			Enabled bool `bson:"enabled"`
		} `bson:"changeStreamPreAndPostImages"`
		Collation struct {
			Locale string `bson:"locale"`
		} `bson:"collation"`
	} `bson:"options"`
}

func (s *source) collections(ctx context.Context) (map[string]collectionInfo, error) {
	cur, err := s.db.ListCollections(ctx, bson.D{{Key: "name", Value: bson.D{{Key: "$in", Value: s.plan.names()}}}})
	if err != nil {
		return nil, err
	}
	var list []collectionInfo
	if err := cur.All(ctx, &list); err != nil {
		return nil, err
	}
	infos := map[string]collectionInfo{}
	for _, i := range list {
		infos[i.Name] = i
	}
	return infos, nil
}

func (i collectionInfo) fault(c followed) error {
	needed := "post-images"
	if c.images.before {
		needed = "pre- and post-images"
	}
	needs := c.images != images{}
	switch {
	case i.Name == "" && needs:
		return fmt.Errorf("collection %[1]q does not exist; create it first, keeping images: db.createCollection(\"%[1]s\", {changeStreamPreAndPostImages: {enabled: true}})", c.name)
	case i.Name == "":
		return nil
	case i.Type != "collection":
		return fmt.Errorf("%q is a %s, which has no change stream; follow the collection behind it", c.name, i.Type)
	case needs && !i.Options.Images.Enabled:
		return fmt.Errorf("collection %[1]q keeps no images, but its bindings need %[2]s; run db.runCommand({collMod: \"%[1]s\", changeStreamPreAndPostImages: {enabled: true}})", c.name, needed)
	}
	return nil
}

// probe opens the stream once and closes it, to learn whether we may.
func (s *source) probe(ctx context.Context) error {
	now, err := s.now(ctx)
	if err != nil {
		return err
	}
	_, err = s.probeToken(ctx, now)
	return err
}

// probeToken is the token that a stream has which is opened at t: after every event
// before t, before every event at t, also for a t to come.
func (s *source) probeToken(ctx context.Context, t bson.Timestamp) (bson.Raw, error) {
	c, err := openCursor(ctx, s, Position{Time: t})
	if err != nil {
		return nil, err
	}
	defer c.close()
	return c.first, nil
}

// reaches reports whether the stream can be opened at a position.
func (s *source) reaches(ctx context.Context, at Position) error {
	c, err := openCursor(ctx, s, at)
	if err != nil {
		return err
	}
	defer c.close()
	_, err = c.next(1, time.Millisecond)
	return err
}

// now is a majority-committed operation time of the source: everything up to it will
// be delivered by a stream, nothing of it can be rolled back. (`ping` answers with the
// last applied time, which may be.)
func (s *source) now(ctx context.Context) (bson.Timestamp, error) {
	reply, err := s.db.RunCommand(ctx, bson.D{
		{Key: "find", Value: s.plan.collections[0].name},
		{Key: "projection", Value: bson.D{{Key: "_id", Value: 1}}},
		{Key: "limit", Value: 1},
		{Key: "singleBatch", Value: true},
		{Key: "readConcern", Value: bson.D{{Key: "level", Value: "majority"}}},
	}).Raw()
	if err != nil {
		return bson.Timestamp{}, err
	}
	var t bson.Timestamp
	var ok bool
	if t.T, t.I, ok = reply.Lookup("operationTime").TimestampOK(); !ok {
		return t, errors.New("the source gives no operation time: it is no replica set")
	}
	return t, nil
}

// replicaSet identifies the source; zero where we may not ask.
func (s *source) replicaSet(ctx context.Context) (bson.ObjectID, error) {
	reply, err := s.db.Client().Database("admin").RunCommand(ctx, bson.D{{Key: "replSetGetConfig", Value: 1}}).Raw()
	var refused mongo.ServerError
	if errors.As(err, &refused) {
		return bson.NilObjectID, nil // no right to, or a mongos
	}
	if err != nil {
		return bson.NilObjectID, err
	}
	id, _ := reply.Lookup("config", "settings", "replicaSetId").ObjectIDOK()
	return id, nil
}

// oldest is the time of the oplog's first entry; zero where we may not read it.
func (s *source) oldest(ctx context.Context) (t bson.Timestamp) {
	reply, err := s.db.Client().Database("local").RunCommand(ctx, bson.D{
		{Key: "find", Value: "oplog.rs"}, {Key: "limit", Value: 1}, {Key: "singleBatch", Value: true},
	}).Raw()
	if err != nil {
		return t
	}
	t.T, t.I, _ = reply.Lookup("cursor", "firstBatch", "0", "ts").TimestampOK()
	return t
}

// splitOn has the server split events over 16 MB from now on, where it can (6.0.9, 7.0
// and newer), and reports whether that may mend err. It is not asked for before the first
// such event: the stage costs a few percent of the server's time for every event. It is
// needed as well to resume after a split event, which is refused with 280 without it.
func (s *source) splitOn(ctx context.Context, err error) bool {
	if s.split.Load() || fault.Global.Off(fault.SplitEvents) || !hasCode(err, tooLargeCodes) && !hasCode(err, []int{280}) {
		return false
	}
	var info struct {
		Version []int `bson:"versionArray"`
	}
	if err := s.db.RunCommand(ctx, bson.D{{Key: "buildInfo", Value: 1}}).Decode(&info); err != nil {
		return true // opening the stream again will tell
	}
	v := info.Version
	s.split.Store(len(v) > 2 && (v[0] >= 7 || v[0] == 6 && (v[1] > 0 || v[2] >= 9)))
	return s.split.Load()
}

// Server codes, by what they mean for the stream. A label of the driver or server
// can say the same for a code that is not listed.
var (
	historyLostCodes = []int{
		286,   // ChangeStreamHistoryLost
		280,   // ChangeStreamFatalError: the token is not found
		136,   // CapedPositionLost
		40576, // resume of change stream was not possible, as the resume token was not found
		40585, // resume of change stream was not possible, as the resume point may no longer be in the oplog
	}
	snapshotCodes     = []int{239, 246}                               // SnapshotTooOld, SnapshotUnavailable
	uuidCodes         = []int{361}                                    // CollectionUUIDMismatch
	badTokenCodes     = []int{9, 15, 260, 207, 40646, 40649, 6189504} // no hex string; truncated; an invalidate's token; altered
	tooLargeCodes     = []int{10334}                                  // BSONObjectTooLarge
	unauthorizedCodes = []int{13, 18, 8000}
)

const nonResumable = "NonResumableChangeStreamError"

func hasCode(err error, codes []int) bool {
	var e mongo.ServerError
	if !errors.As(err, &e) {
		return false
	}
	for _, c := range codes {
		if e.HasErrorCode(c) {
			return true
		}
	}
	return false
}

// malformedToken reports whether the code is one of those that the server's token and
// key parsers have for bytes that make no sense. Each kind of damage has its own: of
// tokens altered at random on 6.0.27, most gave one of 50793 to 50872, 51055 or 51057.
func malformedToken(code int) bool {
	return code >= 50790 && code <= 50899 || code >= 51055 && code <= 51057
}

func codeOf(err error) int {
	var e mongo.CommandError
	errors.As(err, &e)
	return int(e.Code)
}

func isUnauthorized(err error) bool {
	return hasCode(err, unauthorizedCodes) || err != nil && strings.Contains(err.Error(), "auth error")
}

// terminal turns an error that opening the stream again can't mend into what the
// user is told; nil for every other error.
func (s *source) terminal(ctx context.Context, err error, at Position) error {
	if fault.Global.Off(fault.TerminalCodes) {
		return nil
	}
	var server mongo.ServerError
	p := s.plan.projection
	switch {
	case hasCode(err, badTokenCodes), malformedToken(codeOf(err)):
		return &PositionError{Projection: p, Stored: at, Code: codeOf(err), Err: err}
	case hasCode(err, tooLargeCodes):
		return &EventTooLargeError{Projection: p, After: at, Err: err}
	case hasCode(err, historyLostCodes), errors.As(err, &server) && server.HasErrorLabel(nonResumable):
		now, _ := s.now(ctx)
		return &HistoryLostError{Projection: p, Stored: at, Source: now, Oldest: s.oldest(ctx), Code: codeOf(err), Err: err}
	case isUnauthorized(err):
		return &SourceError{Projection: p, Doing: "follow the source", Err: s.missingRight(err)}
	}
	return nil
}
