package side

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A push takes a truncate of a root with those of its partitions, or none of them: taken
// apart, the rest would look like truncates of partitions alone.
func TestATruncateIsNotTorn(t *testing.T) {
	partitions := map[string]int{"p": 3}
	for _, c := range []struct {
		records string // of table p, in lower case, and of q
		limit   int
		take    int
		torn    bool
	}{
		{"uuu", 2, 2, false},
		{"tgggu", 1, 4, false},
		{"utgggu", 1, 1, false},
		{"utgggu", 2, 5, false},
		{"utg", 2, 3, true},
		{"uutg", 2, 2, false}, // not taken, so its partitions' are not either
		{"tgQgQgu", 1, 6, false},
		{"tgQQ", 1, 2, true},
		{"Tuuu", 1, 1, false},
		{"tgggg", 1, 4, false}, // the last is of a partition alone
		{"gu", 1, 1, false},
		{"345", 7, 2, false}, // of so many keys
		{"345", 6, 1, false},
		{"54", 2, 1, false}, // one at least
		{"3tgggu", 4, 5, false},
	} {
		var all []record
		for i, op := range c.records {
			r := record{Seq: int64(i), Name: "p", Op: string(op), N: 1}
			switch {
			case op <= '9':
				r.Op, r.N = "u", int(op-'0')
			case op < 'a':
				r.Name, r.Op = "q", string(op+'a'-'A')
			}
			all = append(all, r)
		}
		take, torn := whole(all, c.limit, partitions)
		require.Equal(t, c.take, take, "%s, %d", c.records, c.limit)
		require.Equal(t, c.torn, torn, "%s, %d", c.records, c.limit)
	}
}
