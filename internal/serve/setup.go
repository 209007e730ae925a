package serve

import (
	"context"

	"backfill/internal/control"
	"backfill/internal/side"
)

// Setup is what sets one side up.
type Setup struct {
	Control, Database string // connection strings
	Site, Side        string
	Role              string // the role the agent signs in as; "" = the one of Database
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
	tables, err := store.Tables(ctx, s.Site)
	if err != nil {
		return nil, err
	}
	db, err := side.Open(ctx, s.Site, s.Side, s.Database)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	steps, err := db.SetupSteps(ctx, tables, s.Role)
	if err != nil || !apply {
		return steps, err
	}
	return steps, db.Setup(ctx, steps)
}
