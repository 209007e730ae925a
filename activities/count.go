package activities

import (
	"context"
	"time"

	"backfill/internal/control"
	"backfill/internal/row"
	"backfill/internal/side"
)

// Count reports this side's tables on a slow clock of its own: rows, layout, key
// and whether capture is healthy. The clock slows down further when counting takes
// long, so that it never takes more than a twentieth of the time.
func (a *Agent) Count(ctx context.Context) error {
	next := time.Time{}
	rung, done := a.bell("site")
	defer done()
	known := 0
	// Events tell of new tables; without them it looks often.
	pause := func() time.Duration {
		if !a.listening.Load() {
			return min(a.CountEvery, time.Second)
		}
		return min(max(time.Until(next), 100*time.Millisecond), a.CountEvery)
	}
	return a.turns(ctx, rung, pause, func() (bool, error) {
		tables, err := a.store.Tables(ctx, a.db.Site)
		if err != nil {
			return false, err
		}
		if len(tables) == known && time.Now().Before(next) {
			return false, nil
		}
		known = len(tables)
		began := time.Now()
		if err := a.CountNow(ctx); err != nil {
			return false, err
		}
		next = time.Now().Add(max(a.CountEvery, 20*time.Since(began)))
		return false, nil
	})
}

func (a *Agent) count(ctx context.Context, t control.Mapped) (side.Count, error) {
	r := side.Relation{Name: t.Relation(a.db.Side)}
	if !t.Captures(a.db.Side) {
		r.Key = t.Made.KeyOrNil()
	}
	return a.db.Count(ctx, r, t.Captures(a.db.Side), a.CountLimit)
}

// CountNow counts and describes all tables of this side once.
func (a *Agent) CountNow(ctx context.Context) error {
	tables, err := a.store.MappedTables(ctx, a.db.Site, "")
	if err != nil {
		return err
	}
	var reports []control.SideReport
	var layouts []*row.Layout
	var of []int // the reports they belong to
	for _, t := range tables {
		c, err := a.count(ctx, t)
		if err != nil {
			reports = append(reports, control.SideReport{TableID: t.ID, Problem: message(err), Unseen: true})
			continue
		}
		r := control.SideReport{TableID: t.ID, Rows: c.Rows, Estimated: c.Estimated, CountedAt: c.At, Shape: c.Table.Shape, Problem: c.Table.Unfit(t.Table, a.db.Side, control.Tables(tables))}
		if r.Problem == "" {
			r.Key = c.Table.Layout.Key
			r.KeyTypes = side.KeyTypes(c.Table.Layout)
			r.CaptureOK = t.Captures(a.db.Side) && c.Capture == ""
			if c.Capture != "" {
				r.Problem = c.Capture
			}
			layouts, of = append(layouts, c.Table.Layout), append(of, len(reports))
		}
		reports = append(reports, r)
	}
	ids, err := a.store.PutLayouts(ctx, layouts)
	if err != nil {
		return err
	}
	for i, id := range ids {
		reports[of[i]].LayoutID = id
	}
	if err := a.faults.at("count: counted"); err != nil {
		return err
	}
	if err := a.store.ReportSide(ctx, a.db.Site, a.db.Side, reports); err != nil {
		return err
	}
	return a.faults.at("count: reported")
}
