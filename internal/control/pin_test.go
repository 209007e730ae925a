package control_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
	"backfill/internal/testkit"
)

func TestASessionOfTheStoreIsAsItReliesOn(t *testing.T) {
	t.Parallel()
	dsn := testkit.Database(t)
	cfg, err := pgx.ParseConfig(dsn)
	require.NoError(t, err)
	conn := testkit.Session(t, dsn)
	for setting, wanted := range map[string][2]string{
		"jit":                           {"on", "off"},
		"synchronous_commit":            {"off", "on"},
		"timezone":                      {"Asia/Kathmandu", "UTC"},
		"datestyle":                     {"German", "ISO, MDY"},
		"default_transaction_isolation": {"serializable", "read committed"},
		"default_transaction_read_only": {"on", "off"},
		"search_path":                   {"nowhere", "pg_catalog"},
		"statement_timeout":             {"1ms", "0"},
		"client_encoding":               {"LATIN1", "UTF8"},
	} {
		testkit.Exec(t, conn, fmt.Sprintf(`ALTER DATABASE %s SET %s = '%s'`, pgx.Identifier{cfg.Database}.Sanitize(), setting, wanted[0]))
		c := cfg.Copy()
		control.Pin(c)
		s, err := pgx.ConnectConfig(t.Context(), c)
		require.NoError(t, err)
		var is string
		require.NoError(t, s.QueryRow(t.Context(), `SELECT current_setting($1)`, setting).Scan(&is))
		require.NoError(t, s.Close(t.Context()))
		require.Equal(t, wanted[1], is, setting)
		testkit.Exec(t, conn, fmt.Sprintf(`ALTER DATABASE %s RESET %s`, pgx.Identifier{cfg.Database}.Sanitize(), setting))
	}
}
