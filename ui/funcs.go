package ui

import (
	"encoding/json"
	"fmt"
	"html/template"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"backfill/internal/backfill"
)

// templates holds each page's template by name, with what all pages share.
type templates map[string]*template.Template

func loadTemplates(a *assets, now func() time.Time) templates {
	base := template.Must(template.New("base").Funcs(template.FuncMap{
		"asset": a.url, "icon": icon, "num": num, "plural": plural, "ago": ago(now), "at": at, "json": toJSON, "join": strings.Join, "list": func(s ...string) []string { return s }, "shorten": shorten, "role": roleArticle,
		"lower": lower, "next": func(n int64) int64 { return n + 1 }, "capitalise": capitalise,
		"rate": rateText, "spell": spell, "moment": func(t time.Time) *time.Time { return &t },
		"deref": func(s *string) string { return *s }, "deref64": func(n *int64) int64 { return *n },
		"revision": func(n int64) map[string]int64 { return map[string]int64{"revision": n} },
		"gateFor":  func(table string) map[string]string { return map[string]string{"table": table} },
		"lastHref": func(c []crumb) string { return c[len(c)-1].Href },
	}).ParseFS(files, "templates/base.html", "templates/parts.html"))
	out := templates{}
	for _, name := range []string{"sites", "tables", "request", "queue", "history", "life", "audit", "proof", "cutover", "reconciliation", "error", "signin", "bounce"} {
		out[name] = template.Must(template.Must(base.Clone()).ParseFS(files, path.Join("templates", name+".html")))
	}
	return out
}

// num writes a number with thousands separators.
func num(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := ""
	if s[0] == '-' {
		sign, s = "−", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// plural is a number and its noun: 1 row, 2 rows.
func plural(n int64, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return num(n) + " " + one + "s"
}

// ago is a time element: how long ago, and exactly on hover. A script keeps the
// words true and says the exact time in the viewer's zone.
func ago(now func() time.Time) func(any) template.HTML {
	return func(v any) template.HTML {
		var t time.Time
		switch v := v.(type) {
		case time.Time:
			t = v
		case *time.Time:
			if v == nil {
				return ""
			}
			t = *v
		}
		t = t.UTC()
		return template.HTML(fmt.Sprintf(`<time datetime="%s" title="%s UTC">%s</time>`,
			t.Format(time.RFC3339Nano), t.Format("2006-01-02 15:04:05"), relative(t, now())))
	}
}

// at is a time element that says the exact time, in words that a script puts into
// the viewer's zone.
func at(t *time.Time) template.HTML {
	return template.HTML(fmt.Sprintf(`<time datetime="%s" data-exact>%s UTC</time>`, t.UTC().Format(time.RFC3339Nano), t.UTC().Format("2006-01-02 15:04:05")))
}

func relative(t, now time.Time) string {
	d := now.Sub(t)
	past := d >= 0
	d = d.Abs()
	var s string
	switch {
	case d < 5*time.Second:
		return "just now"
	case d < time.Minute:
		s = fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		s = plural(int64(d.Minutes()), "minute")
	case d < 24*time.Hour:
		s = plural(int64(d.Hours()), "hour")
	default:
		s = plural(int64(d.Hours()/24), "day")
	}
	if past {
		return s + " ago"
	}
	return "in " + s
}

// spell writes a duration in its two largest units.
func spell(d time.Duration) string {
	switch {
	case d < time.Second:
		return "under 1 s"
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d d %d h", int(d.Hours())/24, int(d.Hours())%24)
}

// toJSON writes a value for an attribute; html/template escapes it there.
func toJSON(v any) (string, error) {
	b, err := json.Marshal(v)
	return string(b), err
}

// longest is how much of a value a list shows.
const longest = 400

// shorten cuts a long value between two characters.
func shorten(s string) string {
	if len(s) <= longest {
		return s
	}
	i := longest
	for i > 0 && !utf8.RuneStart(s[i]) {
		i--
	}
	return s[:i] + "…"
}

func roleArticle(role any) string {
	s := fmt.Sprint(role)
	if strings.HasPrefix(s, "a") {
		return "an " + s
	}
	return "a " + s
}

// look is how a state is shown: a word, a shape and a tone, so that no one of the
// three is needed to tell states apart.
type look struct{ Word, Icon, Tone string }

var looks = map[backfill.State]look{
	backfill.Pending:        {"Pending", "dashed", "quiet"},
	backfill.InProgress:     {"In progress", "half", "info"},
	backfill.AwaitingReview: {"Awaiting review", "eye", "review"},
	backfill.Releasing:      {"Releasing", "forward", "info"},
	backfill.Finished:       {"Finished", "check", "good"},
	backfill.Rejected:       {"Rejected", "slash", "quiet"},
	backfill.Cancelled:      {"Cancelled", "square", "quiet"},
	backfill.Failed:         {"Failed", "alert", "bad"},
}

// icons are 16 × 16 and take the colour of the text around them.
var icons = map[string]string{
	"dashed":   `<circle cx="8" cy="8" r="5.5" stroke-dasharray="2.6 2"/>`,
	"half":     `<circle cx="8" cy="8" r="5.5"/><path d="M8 2.5a5.5 5.5 0 0 1 0 11z" fill="currentColor" stroke="none"/>`,
	"eye":      `<path d="M1.5 8S4 3.5 8 3.5 14.5 8 14.5 8 12 12.5 8 12.5 1.5 8 1.5 8z"/><circle cx="8" cy="8" r="1.9" fill="currentColor" stroke="none"/>`,
	"backward": `<path d="M13.5 8h-10M7.2 4.2 3.4 8l3.8 3.8"/>`,
	"forward":  `<path d="M2.5 8h10M8.8 4.2 12.6 8l-3.8 3.8"/>`,
	"check":    `<path d="m2.8 8.6 3.4 3.4 7-7.6"/>`,
	"slash":    `<circle cx="8" cy="8" r="5.5"/><path d="m4.2 11.8 7.6-7.6"/>`,
	"square":   `<rect x="3.2" y="3.2" width="9.6" height="9.6" rx="1.5"/>`,
	"alert":    `<path d="M8 2 1.8 13.2h12.4z"/><path d="M8 6.4v3.2M8 11.3v.2"/>`,
	"pause":    `<path d="M5.5 3.5v9M10.5 3.5v9" stroke-width="2.4"/>`,
	"play":     `<path d="M4.5 3v10l8-5z" fill="currentColor"/>`,
	"close":    `<path d="m4 4 8 8M12 4l-8 8"/>`,
	"chevron":  `<path d="m6 3.5 4.5 4.5L6 12.5"/>`,
	"key":      `<circle cx="5" cy="8" r="2.8"/><path d="M7.8 8h6.2v2.6M11.4 8v2"/>`,
	"plug":     `<path d="M3 13 6 10M10 6l3-3M6.2 5.4 4.8 6.8a2.6 2.6 0 0 0 0 3.7l.7.7a2.6 2.6 0 0 0 3.7 0l1.4-1.4z"/>`,
	"link":     `<path d="M9.5 2.5h4v4M13.3 2.7 7.5 8.5M7 3.5H3.5v9h9V9"/>`,
	"row":      `<rect x="2" y="5.5" width="12" height="5" rx="1"/><path d="M6 5.5v5"/>`,
	"gap":      `<path d="M2.5 4.5h11M2.5 11.5h11"/><path d="M2.5 8h3M10.5 8h3" stroke-dasharray="1.5 1.5"/>`,
	"clock":    `<circle cx="8" cy="8" r="5.5"/><path d="M8 4.8V8l2.2 1.6"/>`,
}

func icon(name string) template.HTML {
	shape, ok := icons[name]
	if !ok {
		panic("no icon " + name)
	}
	return template.HTML(`<svg class="icon" viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">` + shape + `</svg>`)
}
