package control

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/pace"
)

func TestAGateThatNothingAsksIsShownAsItWasMeasured(t *testing.T) {
	lag := pace.Gate{Name: "lag", Side: "a", Kind: pace.ReplicaLag, Limit: 5}
	reading := func(age time.Duration, value float64) *pace.Reading { return &pace.Reading{Value: value, Age: age} }
	for name, c := range map[string]struct {
		gate  Gate
		state GateState
		open  bool
		why   string
	}{
		"fresh":                     {Gate{lag, reading(time.Second, 1), nil, false}, GateOpen, true, "is 1.0 s"},
		"fresh, over the limit":     {Gate{lag, reading(time.Second, 9), nil, false}, GateClosed, false, "is over the limit of 5.0 s: it is 9.0 s"},
		"of lately":                 {Gate{lag, reading(20*time.Second, 1), nil, false}, GateIdle, true, "is 1.0 s"},
		"of lately, over the limit": {Gate{lag, reading(20*time.Second, 9), nil, false}, GateIdle, false, "is over the limit of 5.0 s: it is 9.0 s"},
		"of lately, asked":          {Gate{lag, reading(20*time.Second, 1), nil, true}, GateClosed, false, "was not measured for more than 10s"},
		"old":                       {Gate{lag, reading(time.Minute, 1), nil, false}, GateClosed, false, "was not measured for more than 10s"},
		"never measured":            {Gate{lag, nil, nil, false}, GateClosed, false, "has not been measured yet"},
		"a limit":                   {Gate{pace.Gate{Name: "slow", Kind: pace.RowsPerSecond, Limit: 5}, nil, nil, false}, GateLimit, true, "at most 5 rows a second"},
	} {
		t.Run(name, func(t *testing.T) {
			state, v := c.gate.State()
			require.Equal(t, c.state, state)
			require.Equal(t, c.open, v.Open)
			require.Contains(t, v.Why, c.why)
		})
	}
}
