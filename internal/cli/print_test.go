package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestSafe(t *testing.T) {
	for in, want := range map[string]string{
		"plain ünïcödé 漢字 👩‍👩‍👧": "plain ünïcödé 漢字 👩‍👩‍👧",
		"\x1b[2J\x07\r\n\t":      `\x1b[2J\a\r\n\t`,
		"\u009b31m\x7f":          `\u009b31m\x7f`,
		"abc\u202edef\u2066":     `abc\u202edef\u2066`,
		"a\u2028b":               `a\u2028b`,
		"\xff\xfeok\xc3":         `\xff\xfeok\xc3`,
		`C:\new`:                 `C:\new`,
	} {
		require.Equal(t, want, safe(in))
	}
}

// Nothing that people see can move the cursor, and it stays within its width.
func TestSafeAndClipAlways(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := safe(string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")) + rapid.String().Draw(t, "text"))
		require.Equal(t, -1, strings.IndexFunc(s, unprintable))
		require.Equal(t, s, safe(s))
		width := rapid.IntRange(0, 40).Draw(t, "width")
		require.LessOrEqual(t, columns(clip(s, width)), width)
	})
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	s := &session{Streams: &Streams{}, out: printer{&out}}
	tab := s.table("NAME", "ROWS", "NOTE")
	tab.flush()
	require.Empty(t, out.String())
	tab.row("漢字", int64(1234567), "")
	tab.row("a\tb", int64(-12), "x")
	tab.row("c", right("–"), "y")
	tab.flush()
	tab.row("later", 5, "z")
	tab.flush()
	require.Equal(t, ""+
		"NAME       ROWS  NOTE\n"+
		"漢字  1,234,567\n"+
		"a\\tb        -12  x\n"+
		"c             –  y\n"+
		"later          5  z\n", out.String())

	out.Reset()
	tab = &table{w: &out, width: 30, names: []string{"A", "B"}, widths: []int{1, 1}, right: make([]bool, 2)}
	tab.row("abcdef", strings.Repeat("x", 50))
	tab.flush()
	require.Equal(t, "A       B\nabcdef  "+strings.Repeat("x", 21)+"…\n", out.String())
}

func TestThousands(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", -123456: "-123,456", 1234567: "1,234,567", -1 << 63: "-9,223,372,036,854,775,808"} {
		require.Equal(t, want, thousands(n))
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m1s", 12*time.Minute + time.Second: "12m", 90 * time.Minute: "1h30m",
		49 * time.Hour: "2d1h", 400 * 24 * time.Hour: "400d",
	} {
		require.Equal(t, want, short(d))
	}
	require.Equal(t, "never", ago(nil))
	past, future, now := time.Now().Add(-90*time.Second), time.Now().Add(62*time.Second), time.Now()
	require.Equal(t, "1m30s ago", ago(&past))
	require.Equal(t, "in 1m1s", ago(&future))
	require.Equal(t, "now", ago(&now))
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		"postgres://u:p@ss/w@host/db":          "postgres://u:…@host/db",
		`cannot parse "postgres://u:pw@h/d"`:   `cannot parse "postgres://u:…@h/d"`,
		"host=h password=hidden user=u":        "host=h password=… user=u",
		"password = 'a b' x":                   "password = … x",
		"postgres://h/d?password=x&sslmode=no": "postgres://h/d?password=…&sslmode=no",
		"token " + secret + ".":                "token ….",
		"http://127.0.0.1:8080 is away":        "http://127.0.0.1:8080 is away",
	} {
		require.Equal(t, want, redact(in))
	}
}
