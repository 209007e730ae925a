package testkit

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/row"
	"backfill/internal/side"
)

func TestMain(m *testing.M) { Main(m) }

// It is the only test here that asks for a server, which a process has one of.
func TestTheServerIsInAContainerWhereThisMachineHasNone(t *testing.T) {
	if os.Getenv("BACKFILL_CONTAINERS") == "" {
		t.Skip("runs in containers: make test-containers")
	}
	t.Setenv("BACKFILL_TEST_DSN", "")
	t.Setenv("BACKFILL_PG_BIN", t.TempDir()) // no programs in it
	t.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
	if os.Getenv("TESTCONTAINERS_HOST_OVERRIDE") == "" {
		t.Setenv("TESTCONTAINERS_HOST_OVERRIDE", "localhost") // Docker is this machine's, also where this looks like a container
	}
	p := NewPair(t, `CREATE TABLE accounts (id int PRIMARY KEY, owner text)`, "public.accounts")
	Exec(t, p.S, `INSERT INTO accounts VALUES (1, 'captured')`)
	require.Equal(t, 1, Value[int](t, p.S, `SELECT count(*) FROM `+row.Ident(side.SchemaName(Site, Source))+`.outbox`))
	require.Equal(t, "/var/lib/postgresql/data", Value[string](t, p.S, `SHOW data_directory`))
}
