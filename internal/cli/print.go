package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"
)

// printer writes for people. Formats are ours and arguments are other people's, so
// every argument is made safe for a terminal on its way through.
type printer struct{ w io.Writer }

func (p printer) printf(format string, args ...any) {
	for i, a := range args {
		switch a := a.(type) {
		case int, int64, float64, byte:
		case error:
			args[i] = safe(a.Error())
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
	if strings.IndexFunc(s, unsafe) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case unsafe(r):
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		default:
			b.WriteRune(r)
		}
		s = s[n:]
	}
	return b.String()
}

func unsafe(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Bidi_Control, unicode.Zl, unicode.Zp)
}

// table prints rows in aligned columns, integers to the right.
type table struct {
	w     io.Writer
	names []string
	rows  [][]any
}

func (p printer) table(names ...string) *table { return &table{w: p.w, names: names} }

func (t *table) row(cells ...any) { t.rows = append(t.rows, cells) }

// flush prints what has been collected; without rows it prints nothing. A later
// flush of the same table prints no names again.
func (t *table) flush() error {
	if len(t.rows) == 0 {
		return nil
	}
	tw := tabwriter.NewWriter(t.w, 0, 0, 2, ' ', 0)
	widths := make([]int, len(t.rows[0]))
	numeric := make([]bool, len(widths))
	for _, row := range t.rows {
		for i, c := range row {
			if s, ok := count(c); ok {
				numeric[i] = true
				widths[i] = max(widths[i], len(s), len(t.names[i]))
			}
		}
	}
	line := func(row []any) {
		for i, c := range row {
			s, ok := count(c)
			if !ok {
				s = safe(fmt.Sprint(c))
			}
			if numeric[i] {
				s = fmt.Sprintf("%*s", widths[i], s)
			}
			if i > 0 {
				s = "\t" + s
			}
			io.WriteString(tw, s)
		}
		io.WriteString(tw, "\n")
	}
	head := make([]any, len(t.names))
	for i, n := range t.names {
		head[i] = n
	}
	line(head)
	for _, row := range t.rows {
		line(row)
	}
	t.rows = nil
	return tw.Flush()
}
