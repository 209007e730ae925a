package cli

import (
	"strings"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// line is a row on one line.
func line(r client.Columns) string {
	parts := make([]string, len(r))
	for i, f := range r {
		parts[i] = f.Name + "=" + value(f.Value)
	}
	return strings.Join(parts, ", ")
}

// value shows a value so that NULL, the empty text and the text NULL differ.
func value(v *string) string {
	switch {
	case v == nil:
		return "NULL"
	case *v == "", *v == "NULL", strings.Contains(*v, ", "), strings.TrimSpace(*v) != *v:
		return "'" + strings.ReplaceAll(*v, "'", "''") + "'"
	}
	return *v
}

// keyLine is a key on one line.
func keyLine(values []string) string { return backfill.Key(values).String() }
