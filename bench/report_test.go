package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestQuantile(t *testing.T) {
	var values []time.Duration
	require.Zero(t, median(values))
	for i := 100; i > 0; i-- {
		values = append(values, time.Duration(i))
	}
	require.Equal(t, time.Duration(51), median(values))
	require.Equal(t, time.Duration(100), quantile(values, 0.99))
	require.Equal(t, time.Duration(7), quantile([]time.Duration{7}, 0.99))
}

// A table shows the ratio to the floor of its workload, which only an empty receiver has, and why a contender is missing.
func TestReport(t *testing.T) {
	r := newReport(options{rows: 10, rounds: 1})
	r.took("orders, receiver empty", floorName, 2*time.Second)
	r.took("orders, receiver empty", walkName, time.Second)
	r.absent("orders, receiver empty", "pgcopydb", "not installed")
	r.took("orders, receiver full", wholeName, 5*time.Second)
	r.figure("An idle site", "api", "1 %")
	r.figure("An idle site", "api", "2 %")
	path := filepath.Join(t.TempDir(), "results.md")
	require.NoError(t, r.write(path))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, line := range []string{
		"| Backfill: walk into staging | 1.00 s | 1.00–1.00 s | 0.50 | 1.1 |",
		"| pgcopydb | not installed | | | |",
		"| **Backfill**, from request to drained | 5.00 s | 5.00–5.00 s | 2.50 |",
		"| api | 2 % |",
	} {
		require.Contains(t, string(text), line+"\n")
	}
	require.NotContains(t, string(text), "1 %")
}

func TestABusyMachineIsTold(t *testing.T) {
	require.True(t, busy("1000.5 3 2"))
	require.False(t, busy("0.00 3 2"))
	require.False(t, busy("unknown"))
}

func TestLatenciesAreThoseWithinATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "turn0")
	require.NoError(t, os.WriteFile(path, []byte("0 1 1500 0 1000 0 20\n1 1 2500 0 1001 500000 20\n0 2 9000 0 1003 0 20\n"), 0o600))
	took, err := latenciesOf(path, time.Unix(1000, 1), time.Unix(1002, 0), nil)
	require.NoError(t, err)
	require.Equal(t, []time.Duration{2500 * time.Microsecond}, took)
}
