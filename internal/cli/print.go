package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"backfill/internal/backfill"
)

// printer writes for people. Formats are ours and arguments are other people's, so
// every argument is made safe for a terminal on its way through. An int64 is a
// count; its verb is %v.
type printer struct{ w io.Writer }

func (p printer) printf(format string, args ...any) {
	for i, a := range args {
		switch a := a.(type) {
		case int64:
			args[i] = thousands(a)
		case int, float64:
		default:
			args[i] = safe(fmt.Sprint(a))
		}
	}
	fmt.Fprintf(p.w, format, args...)
}

// safe shows control characters as escapes: a value that moves the cursor, renames
// the window or turns the writing direction around could make a person read, and
// approve, something else than what is there.
func safe(s string) string {
	if utf8.ValidString(s) && strings.IndexFunc(s, unprintable) < 0 {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case unprintable(r):
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		default:
			b.WriteRune(r)
		}
		s = s[n:]
	}
	return b.String()
}

func unprintable(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Bidi_Control, unicode.Zl, unicode.Zp)
}

// columns is how many columns of a terminal s takes.
func columns(s string) int {
	n := 0
	for _, r := range s {
		n += runeColumns(r)
	}
	return n
}

func runeColumns(r rune) int {
	switch {
	case r < 0x300:
		return 1
	case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		return 0
	case unicode.In(r, unicode.Han, unicode.Hangul, unicode.Hiragana, unicode.Katakana),
		r >= 0xFF01 && r <= 0xFF60, r >= 0x1F300 && r <= 0x1FAFF:
		return 2
	}
	return 1
}

// clip cuts s to a width, and shows that it did.
func clip(s string, width int) string {
	switch {
	case columns(s) <= width:
		return s
	case width < 1:
		return ""
	}
	used := 0
	for i, r := range s {
		if used += runeColumns(r); used >= width {
			return s[:i] + "…"
		}
	}
	return s
}

// table prints rows in aligned columns, numbers to the right. On a terminal the
// last column is cut so that a row stays one line.
type table struct {
	w      io.Writer
	width  int // of the terminal, 0 for no limit
	names  []string
	rows   [][]string
	widths []int
	right  []bool
	begun  bool
}

// right is a cell that is aligned like a number.
type right string

func (s *session) table(names ...string) *table {
	t := &table{w: s.out.w, width: s.width(), names: names, widths: make([]int, len(names)), right: make([]bool, len(names))}
	for i, n := range names {
		t.widths[i] = columns(n)
	}
	return t
}

func (t *table) row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		switch c := c.(type) {
		case int64:
			row[i], t.right[i] = thousands(c), true
		case int:
			row[i], t.right[i] = thousands(int64(c)), true
		case right:
			row[i], t.right[i] = safe(string(c)), true
		default:
			row[i] = safe(fmt.Sprint(c))
		}
		t.widths[i] = max(t.widths[i], columns(row[i]))
	}
	t.rows = append(t.rows, row)
}

// flush prints the rows collected so far, under the names of the columns the first
// time. Without any row it prints nothing.
func (t *table) flush() {
	if len(t.rows) > 0 && !t.begun {
		t.begun = true
		t.line(t.names)
	}
	for _, row := range t.rows {
		t.line(row)
	}
	t.rows = nil
}

func (t *table) line(cells []string) {
	var b strings.Builder
	used, last := 0, len(cells)-1
	for i, c := range cells {
		if i == last && t.width > 0 {
			c = clip(c, max(t.width-used, 20))
		}
		pad := strings.Repeat(" ", max(t.widths[i]-columns(c), 0))
		if t.right[i] {
			c = pad + c
		} else {
			c += pad
		}
		b.WriteString(c + "  ")
		used += t.widths[i] + 2
	}
	io.WriteString(t.w, strings.TrimRight(b.String(), " ")+"\n")
}

func thousands(n int64) string { return backfill.Thousands(n) }

// rows is a number of rows, of whatever kind.
func rows(n int64, kind string) string {
	if n == 1 {
		return "1 " + kind + "row"
	}
	return thousands(n) + " " + kind + "rows"
}

// ago is a time as seen from now.
func ago(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "never"
	}
	switch d := time.Since(*t); {
	case d < -time.Second:
		return "in " + short(-d)
	case d < time.Second:
		return "now"
	default:
		return short(d) + " ago"
	}
}

// short is a duration in at most two units.
func short(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d/time.Second))
	case d < time.Hour:
		return two(d, time.Minute, "m", time.Second, "s")
	case d < day:
		return two(d, time.Hour, "h", time.Minute, "m")
	}
	return two(d, day, "d", time.Hour, "h")
}

func two(d, big time.Duration, bigName string, small time.Duration, smallName string) string {
	s := fmt.Sprintf("%d%s", d/big, bigName)
	// Beyond ten of the big unit nobody cares for the small one.
	if rest := d % big / small; rest > 0 && d < 10*big {
		s += fmt.Sprintf("%d%s", rest, smallName)
	}
	return s
}

// dash stands for what there is none of.
func dash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}
