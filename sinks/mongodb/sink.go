package mongodb

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/tidemark-go/tidemark/projector"
)

// Projection, Bindings and Binding are the projector's, with this sink's transaction
// filled in.
type (
	Projection = projector.Projection[*Tx]
	Bindings   = []projector.Binding[*Tx]
	Binding    = projector.Binding[*Tx]
)

// Sink keeps read models in a MongoDB database. It is safe for use by several
// projections and goroutines.
type Sink struct {
	db          *mongo.Database
	checkpoints *mongo.Collection
	limit       time.Duration
	grace       time.Duration

	mu       sync.Mutex
	sessions map[string]*session // by place
}

// Option changes how a Sink works.
type Option func(*Sink)

// TimeLimit bounds one transaction, from its first statement to the answer to its
// last. It must stay well under the server's transactionLifetimeLimitSeconds (60 by
// default), or the server ends long transactions in its own way. Default 30 s.
func TimeLimit(d time.Duration) Option { return func(s *Sink) { s.limit = d } }

// New makes a sink on a database, whose client stays the caller's to configure and to
// disconnect. It may be on the source's cluster, and even be the database that is
// followed. Read and write concerns of db don't matter: the sink uses its own.
func New(db *mongo.Database, opts ...Option) *Sink {
	s := &Sink{db: db, limit: 30 * time.Second, grace: time.Second, sessions: map[string]*session{}}
	for _, o := range opts {
		o(s)
	}
	s.checkpoints = db.Collection(checkpoints, options.Collection().
		SetReadPreference(readpref.Primary()).SetReadConcern(readconcern.Local()).SetWriteConcern(writeconcern.Majority()).
		SetRegistry(bson.NewRegistry()).SetBSONOptions(&options.BSONOptions{}))
	return s
}

var _ projector.Sink[*Tx] = (*Sink)(nil)

// Load implements projector.Sink. For a generation that the sink does not know it
// returns a checkpoint with Term 0. It is for the owner: a transaction that holds the
// checkpoint for longer than about a second is taken for a dead one's and ended. Who
// only wants to look reads the collection tidemark.checkpoints.
func (s *Sink) Load(ctx context.Context, projection string, generation int64) (projector.Checkpoint, error) {
	for {
		g := generation
		if g == 0 {
			var live struct {
				Generation int64 `bson:"generation"`
			}
			err := s.checkpoints.FindOne(ctx, append(ofProjection(projection), onlyLive)).Decode(&live)
			if errors.Is(err, mongo.ErrNoDocuments) {
				return fresh(projection, 1), nil
			}
			if err != nil {
				return projector.Checkpoint{}, loading(projection, err)
			}
			g = live.Generation
		}
		cp, phase, err := s.load(ctx, projection, g)
		if err != nil {
			return projector.Checkpoint{}, loading(projection, err)
		}
		if generation == g || phase == string(projector.Live) {
			return cp, nil
		} // else there was a switch before the document was locked
	}
}

func loading(projection string, err error) error {
	return failed("read the checkpoint of projection "+strconv.Quote(projection), err)
}

// load reads a generation's checkpoint under the lock, and the phase that is stored, "" for
// none.
func (s *Sink) load(ctx context.Context, projection string, generation int64) (_ projector.Checkpoint, phase string, err error) {
	s.settled(ctx, projection, generation)
	var found bson.Raw
	err = s.underLock(ctx, projection, func(ctx context.Context) (err error) {
		// It must change the document, or it would take no lock.
		found, err = s.checkpoints.FindOneAndUpdate(ctx, byID(projection, generation), inc("loads", 1),
			options.FindOneAndUpdate().SetReturnDocument(options.After)).Raw()
		return err
	})
	if err != nil {
		return fresh(projection, generation), "", ignore(err, mongo.ErrNoDocuments)
	}
	d, err := decode(projection, found)
	phase, _ = found.Lookup("phase").StringValueOK()
	return d.checkpoint, phase, err
}
