package dev

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

	"backfill/internal/local"
)

var demoTables = []string{"public.students", "public.enrollments", "public.attendance"}

// demoSQL makes the tables of one side and fills them with the rows of students
// numbered up to a limit; a row depends on its number only, so that both sides
// agree on what they have in common.
//
//go:embed demo.sql
var demoSQL string

// Students each side knows before capture begins: the school all of them, the
// centre only the oldest.
const schoolStudents, centralStudents = 20_000, 1_500

// demo is two databases, one of them missing history, and an application that
// keeps writing to the other.
type demo struct {
	postgres *local.Postgres
	log      *zap.Logger
}

// agentDSN is the connection string of the agent's own role. The application
// writes as another one, so that it cannot hide its writes.
func (d *demo) agentDSN(side string) string { return d.as("backfill_agent", side) }

func (d *demo) as(role, database string) string {
	u, err := url.Parse(d.postgres.DSN(database))
	if err != nil {
		panic(err) // the DSN is our own
	}
	q := u.Query()
	q.Set("application_name", role)
	u.RawQuery = q.Encode()
	password, _ := u.User.Password()
	u.User = url.UserPassword(role, password)
	return u.String()
}

func (d *demo) prepare(ctx context.Context, say func(string, ...any)) error {
	for side, students := range map[string]int{"school": schoolStudents, "central": centralStudents} {
		if err := d.prepareSide(ctx, side, students, say); err != nil {
			return fmt.Errorf("%s: %w", side, err)
		}
	}
	return nil
}

func (d *demo) prepareSide(ctx context.Context, side string, students int, say func(string, ...any)) error {
	if err := d.postgres.CreateDatabase(ctx, side); err != nil {
		return err
	}
	c, err := pgx.Connect(ctx, d.postgres.DSN(side))
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	var made bool
	if err := c.QueryRow(ctx, `SELECT to_regclass('public.attendance') IS NOT NULL`).Scan(&made); err != nil || made {
		return err
	}
	say("making the demo database %s", side)
	u, err := url.Parse(d.postgres.DSN(side))
	if err != nil {
		return err
	}
	password, _ := u.User.Password()
	return pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
		for name, value := range map[string]string{"demo.password": password, "demo.students": fmt.Sprint(students), "demo.database": side} {
			if _, err := tx.Exec(ctx, `SELECT set_config($1, $2, true)`, name, value); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, demoSQL)
		return err
	})
}

// write is the application: a few changes at a time, all the time.
func (d *demo) write(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := d.writeFor(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn("the demo's writer lost its connection", zap.Error(err))
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	return nil
}

func (d *demo) writeFor(ctx context.Context) error {
	c, err := pgx.Connect(ctx, d.as("school_app", "school"))
	if err != nil {
		return err
	}
	defer c.Close(context.WithoutCancel(ctx))
	for {
		student := 1 + rand.IntN(schoolStudents)
		var sql string
		switch n := rand.IntN(10); {
		case n < 3:
			sql = `INSERT INTO attendance (student_id, day, present, note)
				SELECT id, current_date, random() < 0.9, 'taken just now' FROM students WHERE id = $1 ON CONFLICT (student_id, day) DO UPDATE SET present = excluded.present`
		case n < 6:
			sql = `UPDATE students SET email = 'student' || id || '@maple.example', updated_at = clock_timestamp() WHERE id = $1`
		case n < 8:
			sql = `WITH s AS (INSERT INTO students (name, born, email) SELECT 'Newcomer ' || $1::int, date '2012-01-01' + $1::int % 365, NULL RETURNING id)
				INSERT INTO enrollments (student_id, course, enrolled_on) SELECT id, 'Orientation', current_date FROM s`
		case n < 9:
			sql = `UPDATE enrollments SET grade = round((1 + random() * 5)::numeric, 1) WHERE student_id = $1`
		default:
			sql = `DELETE FROM attendance WHERE student_id = $1 AND day < current_date - 20`
		}
		if _, err := c.Exec(ctx, sql, student); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.New("stopped")
		case <-time.After(100 * time.Millisecond):
		}
	}
}
