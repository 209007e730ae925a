package main

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"time"

	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/metrics"
	"go.temporal.io/server/common/persistence/sql"
	"go.temporal.io/server/common/persistence/sql/sqlplugin"
	"go.temporal.io/server/common/persistence/sql/sqlplugin/sqlite"
	"go.temporal.io/server/common/resolver"
	sqliteschema "go.temporal.io/server/schema/sqlite"
	"google.golang.org/protobuf/types/known/durationpb"
	driver "modernc.org/sqlite"
	codes "modernc.org/sqlite/lib"
)

// retention is how long closed workflows stay readable in a namespace created here.
const retention = 7 * 24 * time.Hour

// openStore makes sure that the file holds Temporal's schema and the namespace, and returns how to connect to it. The
// file is this process's alone for as long as it lives; whoever comes second waits a little, then fails.
func openStore(file string) (*config.SQL, error) {
	path, err := filepath.Abs(file)
	if err != nil {
		return nil, fmt.Errorf("database file %s: %w", file, err)
	}
	store := &config.SQL{
		PluginName:   sqlite.PluginName,
		DatabaseName: (&url.URL{Path: path}).EscapedPath(), // SQLite reads it as part of a URI
		ConnectAttributes: map[string]string{
			"mode":         "rwc",
			"busy_timeout": "10000", // milliseconds; one that was just killed may still be on its way out
			"journal_mode": "wal",
			"locking_mode": "exclusive",
			// A process that dies loses nothing. A machine that does may lose the last moments, never consistency, and in
			// return no workflow task waits for the disk.
			"synchronous": "normal",
		},
	}
	switch err := setupSchema(store); {
	case err == nil:
	case isBusy(err):
		return nil, fmt.Errorf("database file %s is in use; stop the other server or name another file with --db", file)
	default:
		return nil, fmt.Errorf("set up the schema in %s: %w", file, err)
	}
	ns, err := sqliteschema.NewNamespaceConfig(clusterName, namespace, false, searchAttributes)
	if err != nil {
		return nil, fmt.Errorf("describe namespace %s: %w", namespace, err)
	}
	ns.Detail.Config.Retention = durationpb.New(retention)
	if err := sqliteschema.CreateNamespaces(store, ns); err != nil {
		return nil, fmt.Errorf("create namespace %s in %s: %w", namespace, file, err)
	}
	return store, nil
}

// setupSchema fills an empty database in one transaction, so that being killed half-way leaves it empty. Statements of
// one transaction may be sent one by one because the plugin holds a single connection.
func setupSchema(store *config.SQL) error {
	db, err := sql.NewSQLAdminDB(sqlplugin.DbKindUnknown, store, resolver.NewNoopResolver(), log.NewNoopLogger(), metrics.NoopMetricsHandler)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if tables, err := db.ListTables(store.DatabaseName); err != nil || len(tables) > 0 {
		return err
	}
	if err := db.Exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	if err := sqliteschema.SetupSchemaOnDB(db); err != nil {
		return err
	}
	return db.Exec("COMMIT")
}

func isBusy(err error) bool {
	var failure *driver.Error
	return errors.As(err, &failure) && failure.Code() == codes.SQLITE_BUSY
}
