package api

import (
	"context"
	"os"
	"path/filepath"

	"backfill/internal/local"
)

func startPostgres(ctx context.Context) (stop func(), err error) {
	dir, err := os.MkdirTemp("", "backfill-api-")
	if err != nil {
		return nil, err
	}
	pg, err := local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(dir, "pg"), Fast: true})
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	dsnOf = pg.DSN
	return func() {
		_ = pg.Stop(context.Background())
		os.RemoveAll(dir)
	}, nil
}
