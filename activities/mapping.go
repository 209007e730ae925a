package activities

import (
	"context"
	"encoding/json"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// tryMappings does this side's part of the trials of mappings, until ctx ends.
func (a *Agent) tryMappings(ctx context.Context) {
	rung, done := a.bell("mapping")
	defer done()
	for ctx.Err() == nil {
		a.trouble("mappings cannot be checked", a.TryMappings(ctx))
		select {
		case <-ctx.Done():
		case <-rung:
		case <-time.After(idleApply):
		}
	}
}

// TryMappings does this side's part of the trials in which it is its turn.
func (a *Agent) TryMappings(ctx context.Context) error {
	all, err := a.store.Trials(ctx, a.db.Site, a.db.Side)
	if err != nil {
		return err
	}
	for _, t := range all {
		err := a.try(ctx, &t)
		if side.SQLState(err) != "" {
			// The database refuses what a trial needs; whoever asked is told.
			t.Fields, err = []backfill.FieldError{{Field: "mapping", Message: "it cannot be checked on " + a.db.Side + ": " + message(err)}}, nil
		}
		if err != nil {
			return err
		}
		if err := a.store.PutTrial(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

func (a *Agent) try(ctx context.Context, t *control.MappingTrial) (err error) {
	switch {
	case t.Layout == nil:
		return a.offer(ctx, t)
	case t.Made == nil:
		var rows [][]*string
		if err := json.Unmarshal(t.Rows, &rows); err != nil {
			return err
		}
		tried, err := a.db.TryMapping(ctx, &t.Mapping, t.To, t.Layout, rows)
		if err != nil {
			return err
		}
		t.Made, t.Fields = tried.Made, tried.Fields
		t.Rows, err = json.Marshal(tried.Rows)
		return err
	}
	t.Fields, err = a.db.AgreeOnMapping(ctx, t.From, t.Made)
	t.Agreed = len(t.Fields) == 0
	return err
}

// offer tells what the source's table looks like.
func (a *Agent) offer(ctx context.Context, t *control.MappingTrial) error {
	table, rows, err := a.db.SampleOfSource(ctx, t.From, t.Sample)
	if err != nil {
		return err
	}
	if table.Problem != "" {
		t.Fields = []backfill.FieldError{{Field: "mapping.source", Message: "side " + a.db.Side + ": " + table.Problem}}
		return nil
	}
	if rows == nil {
		rows = [][]*string{}
	}
	t.Layout = table.Layout
	t.Rows, err = json.Marshal(rows)
	return err
}
