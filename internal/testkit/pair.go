package testkit

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// The names of every pair's site and sides. Changes go from Source to Receiver.
const Site, Source, Receiver = "maple", "school", "central"

// Pair is a site on databases of its own: a source, a receiver, and the control
// database, with the tables configured and capture set up.
type Pair struct {
	testing.TB
	ControlDSN, SourceDSN, ReceiverDSN string

	Store  *control.Store
	From   *side.DB
	To     *side.DB
	Out    backfill.Direction // from source to receiver
	Tables map[string]backfill.Table

	// Sessions of a person or an application, one on each database.
	C, S, R *pgx.Conn
}

// NewPair makes a pair whose sides hold what schema makes, on both, and whose
// tables are captured on the source. They are named parents first.
func NewPair(t testing.TB, schema string, tables ...string) *Pair {
	t.Helper()
	return NewPairOf(t, schema, schema, tables...)
}

// NewPairOf makes a pair whose sides differ.
func NewPairOf(t testing.TB, source, receiver string, tables ...string) *Pair {
	t.Helper()
	return NewPairAt(t, Database(t), source, receiver, tables...)
}

// NewPairAt makes a pair whose source is a database of the test's own.
func NewPairAt(t testing.TB, sourceDSN, source, receiver string, tables ...string) *Pair {
	t.Helper()
	return NewPairIn(t, Places{Source: sourceDSN}, source, receiver, tables...)
}

// Places are the connection strings of a pair's databases. One left out is a database
// that NewPairIn gives the pair; the control database has to be migrated.
type Places struct{ Control, Source, Receiver string }

// NewPairIn makes a pair some of whose databases are the test's own.
func NewPairIn(t testing.TB, at Places, source, receiver string, tables ...string) *Pair {
	t.Helper()
	if at.Control == "" {
		at.Control = ControlDSN(t)
	}
	if at.Source == "" {
		at.Source = Database(t)
	}
	if at.Receiver == "" {
		at.Receiver = Database(t)
	}
	p := &Pair{TB: t, ControlDSN: at.Control, SourceDSN: at.Source, ReceiverDSN: at.Receiver, Tables: map[string]backfill.Table{}}
	p.Store = Open(t, p.ControlDSN)
	p.C, p.S, p.R = Session(t, p.ControlDSN), Session(t, p.SourceDSN), Session(t, p.ReceiverDSN)
	Exec(t, p.S, source)
	Exec(t, p.R, receiver)
	p.From, p.To = OpenSide(t, Source, p.SourceDSN), OpenSide(t, Receiver, p.ReceiverDSN)
	ctx := t.Context()
	create := p.Store.CreateSite
	if at.Source == at.Receiver {
		create = p.Store.CreateSiteInOne
		p.From.ShareDatabase()
		p.To.ShareDatabase()
	}
	require.NoError(t, create(ctx, "test", Site, [2]string{Source, Receiver}))
	for i, name := range tables {
		order := (i + 1) * 10
		p.Configure(name, control.TableChange{CapturedFrom: []string{Source}, ApplyOrder: &order})
	}
	var err error
	p.Out, err = p.Store.Direction(ctx, Site, Source)
	require.NoError(t, err)
	p.Setup()
	return p
}

// OpenSide opens one side of a pair's site.
func OpenSide(t testing.TB, name, dsn string) *side.DB {
	t.Helper()
	db, err := side.Open(t.Context(), Site, name, dsn)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return db
}

// Configure changes a table's configuration.
func (p *Pair) Configure(table string, c control.TableChange) {
	p.Helper()
	t, err := p.Store.PutTable(p.Context(), "test", Site, table, c)
	require.NoError(p, err)
	p.Tables[t.Name] = *t
}

// Setup sets both sides up, or repairs them.
func (p *Pair) Setup() {
	p.Helper()
	ctx := p.Context()
	tables, err := p.Store.Tables(ctx, Site)
	require.NoError(p, err)
	for _, db := range []*side.DB{p.From, p.To} {
		steps, err := db.SetupSteps(ctx, tables, side.Roles{})
		require.NoError(p, err)
		require.NoError(p, db.Setup(ctx, steps))
	}
}

// ByID returns the configured tables by id.
func (p *Pair) ByID() map[int32]backfill.Table {
	out := map[int32]backfill.Table{}
	for _, t := range p.Tables {
		out[t.ID] = t
	}
	return out
}

// Request asks for a backfill of a table, or of one row of it.
func (p *Pair) Request(table string, key ...string) *backfill.Request {
	p.Helper()
	n := control.NewRequest{Direction: p.Out.ID, TableID: p.Tables[table].ID, Mode: backfill.ModeFull, By: "test"}
	if len(key) > 0 {
		n.Mode, n.Key = backfill.ModeRow, key
	}
	r, err := p.Store.CreateRequest(p.Context(), n)
	require.NoError(p, err)
	return r
}

// Approve approves a request as it stands.
func (p *Pair) Approve(id int64) {
	p.Helper()
	p.decide(id, p.Store.Approve, control.Decision{By: "reviewer"})
}

// ApproveDiffering approves all rows but those judged identical.
func (p *Pair) ApproveDiffering(id int64) {
	p.Helper()
	p.decide(id, p.Store.Approve, control.Decision{By: "reviewer", SkipIdentical: true})
}

// Reject rejects a request as it stands.
func (p *Pair) Reject(id int64) {
	p.Helper()
	p.decide(id, p.Store.Reject, control.Decision{By: "reviewer", Note: "no"})
}

func (p *Pair) decide(id int64, how func(context.Context, int64, control.Decision) (*backfill.Request, error), d control.Decision) {
	p.Helper()
	d.Revision = p.Now(id).Revision
	_, err := how(p.Context(), id, d)
	require.NoError(p, err)
}

// Now is a request as it stands.
func (p *Pair) Now(id int64) *backfill.Request {
	p.Helper()
	r, err := p.Store.Request(p.Context(), id)
	require.NoError(p, err)
	return r
}

// Rows are a table's rows as text, in the order of that text.
func Rows(t testing.TB, conn *pgx.Conn, table string) []string {
	t.Helper()
	return Strings(t, conn, `SELECT r::text FROM `+table+` r ORDER BY r::text COLLATE "C"`)
}

// Equal fails unless both sides hold the same rows, by their text.
func (p *Pair) Equal(tables ...string) {
	p.Helper()
	for _, table := range tables {
		require.Equal(p, Rows(p, p.S, table), Rows(p, p.R, table), "the sides differ in %s", table)
	}
}

// List returns the configured tables.
func (p *Pair) List() (all []backfill.Table) {
	for _, t := range p.Tables {
		all = append(all, t)
	}
	return all
}
