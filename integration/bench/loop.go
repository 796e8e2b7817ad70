package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// loopEvents is how many events the hand-written loop takes: half inserts, half updates, from the middle of the backlog.
const loopEvents = 5000

const loopTables = `
	CREATE TABLE counts (status text PRIMARY KEY, n bigint NOT NULL, amount bigint NOT NULL);
	CREATE TABLE token (id int PRIMARY KEY, value bytea NOT NULL);
	INSERT INTO token VALUES (1, '')`

// handWritten is the loop that most people write: a transaction per event, which adds to the counters and saves the
// resume token.
func handWritten(ctx context.Context, j job, _ *parent) (r result, err error) {
	db, err := connect(ctx, j.Mongo, j.Database)
	if err != nil {
		return r, err
	}
	conn, err := pgx.Connect(ctx, j.Target)
	if err != nil {
		return r, err
	}
	if _, err := conn.Exec(ctx, loopTables); err != nil {
		return r, err
	}
	begin := time.Now()
	cs, err := watch(ctx, db, j)
	if err != nil {
		return r, err
	}
	for range j.Events {
		if !cs.Next(ctx) {
			return r, errors.Join(errors.New("the stream has ended"), cs.Err())
		}
		var event struct {
			Token  bson.Raw `bson:"_id"`
			Before *order   `bson:"fullDocumentBeforeChange"`
			After  *order   `bson:"fullDocument"`
		}
		if err := cs.Decode(&event); err != nil {
			return r, err
		}
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			add := func(o *order, sign int64) error {
				if o == nil {
					return nil
				}
				_, err := tx.Exec(ctx, `INSERT INTO counts VALUES ($1, $2, $3) ON CONFLICT (status)
					DO UPDATE SET n = counts.n + excluded.n, amount = counts.amount + excluded.amount`, o.Status, sign, sign*o.Amount)
				return err
			}
			if err := errors.Join(add(event.Before, -1), add(event.After, 1)); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "UPDATE token SET value = $1 WHERE id = 1", event.Token)
			return err
		})
		if err != nil {
			return r, err
		}
	}
	r.Seconds, r.CPU = time.Since(begin).Seconds(), ownCPU()
	r.RSS, err = peakRSS()
	return r, errors.Join(err, cs.Close(ctx), conn.Close(ctx), db.Client().Disconnect(ctx))
}

// checkLoop compares the loop's counters with what its events add up to.
func checkLoop(ctx context.Context, conn *pgx.Conn, log backlog) error {
	want := sums{}
	for n := log.tail; n < log.orders; n++ {
		want.add(orderAt(n), 1)
	}
	for _, n := range updateOrder(log.orders)[:log.orders-log.tail] {
		want.add(orderAt(n), -1)
		want.add(changedOrder(n), 1)
	}
	got, err := readSums(ctx, conn, "SELECT status, n, amount FROM counts")
	if err != nil {
		return err
	}
	return got.differs(want)
}
