package serve

import (
	"context"
	"slices"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// Setup is what sets one side up.
type Setup struct {
	Control, Database string // connection strings
	Site, Side        string
	Roles             side.Roles
	Tables            []string // whose rights are given too, although they are not configured yet
}

// Steps returns what has to be run on the side, and with apply runs it.
func (s Setup) Steps(ctx context.Context, apply bool) ([]side.Step, error) {
	store, err := control.Open(ctx, s.Control)
	if err != nil {
		return nil, err
	}
	defer store.Disconnect()
	if _, err := store.Direction(ctx, s.Site, s.Side); err != nil {
		return nil, err
	}
	site, err := store.Site(ctx, s.Site)
	if err != nil {
		return nil, err
	}
	tables, err := store.Tables(ctx, s.Site)
	if err != nil {
		return nil, err
	}
	for _, name := range s.Tables {
		parsed, err := backfill.ParseTableName(name)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(tables, func(t backfill.Table) bool { return t.Name == parsed.String() }) {
			tables = append(tables, backfill.Table{Name: parsed.String()})
		}
	}
	db, err := side.Open(ctx, s.Site, s.Side, s.Database)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	if site.OneDatabase {
		db.ShareDatabase()
	}
	steps, err := db.SetupSteps(ctx, tables, s.Roles)
	if err != nil || !apply {
		return steps, err
	}
	return steps, db.Setup(ctx, steps)
}
