package serve

import (
	"testing"

	"backfill/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
