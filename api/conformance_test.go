package api

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

var (
	seed  = flag.Uint64("seed", 0, "of the random requests; by the clock when 0")
	tries = flag.Int("tries", 12, "random requests for each operation that are right, and so many that are wrong on purpose")
)

// Every operation of the document is driven with input made from its schemas, right
// and wrong: no answer is a fault of ours, each has a status and a shape that the
// document names, and a problem says what is wrong without saying how we are built.
func TestConformance(t *testing.T) {
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d", first)
	doc := loadDocument()
	drive := func(t *testing.T, w *world, method, path string) {
		op := doc.Paths.Find(path).GetOperation(method)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("again with: go test ./api -run 'TestConformance/.*/%s$' -seed %d -tries %d", op.OperationID, first, *tries)
			}
		})
		h := fnv.New64a()
		io.WriteString(h, op.OperationID)
		d := &driver{T: t, world: w, Rand: rand.New(rand.NewPCG(first, h.Sum64())), method: method, path: path, op: op,
			params: slices.Concat(doc.Paths.Find(path).Parameters, op.Parameters)}
		for i := 0; i < *tries || d.served == 0 && i < 20**tries; i++ { // some values fit seldom
			d.plain = i == 0
			if op.OperationID != "tryMapping" { // it waits for the agents
				d.try(d.request())
			}
			d.try(d.bend(d.request()))
		}
		require.True(t, d.served > 0 || op.OperationID == "tryMapping", "none of %d right requests was served: the values of known do not fit", *tries)
	}
	var reads, changes [][2]string
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			switch ok := op.Responses.Value("200"); {
			case ok != nil && ok.Value.Content.Get("text/event-stream") != nil: // its answer has no end; events_test.go
			case method == http.MethodGet:
				reads = append(reads, [2]string{method, path})
			default:
				changes = append(changes, [2]string{method, path})
			}
		}
	}
	t.Run("read", func(t *testing.T) {
		w := newWorld(t)
		w.prepare("")
		for _, r := range reads {
			t.Run(doc.Paths.Find(r[1]).GetOperation(r[0]).OperationID, func(t *testing.T) { drive(t, w, r[0], r[1]) })
		}
	})
	t.Run("change", func(t *testing.T) {
		for _, r := range changes {
			id := doc.Paths.Find(r[1]).GetOperation(r[0]).OperationID
			t.Run(id, func(t *testing.T) {
				w := newWorld(t)
				w.prepare(id)
				drive(t, w, r[0], r[1])
			})
		}
	})
}

// prepare puts something in each place that an operation reads or changes.
func (w *world) prepare(operation string) {
	id := w.staged(3)
	require.Equal(w, int64(1), id)
	w.table("public.items", []string{"id"}, []string{"bigint"})
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, layout_id, snap, op, key, row) SELECT d.id, t.id, l.id, '1:1:', 'u', '{1}', ARRAY['1', 'z', NULL]
		FROM backfill_control.direction d, backfill_control.table_config t, backfill_control.layout l WHERE d.from_side = 'school' AND t.name = 'public.orders'`)
	w.exec(`UPDATE backfill_control.direction SET applied_seq = 1`)
	w.exec(`INSERT INTO backfill_control.quarantine (direction, seq, table_id, key, state, reason, since) SELECT d.id, 1, t.id, '{1}', 'quarantined', 'violates a constraint', now()
		FROM backfill_control.direction d, backfill_control.table_config t WHERE d.from_side = 'school' AND t.name = 'public.orders'`)
	switch operation {
	default:
		w.reconciled()
	case "cancelReconciliation":
		a := w.post(control.Requester, "/api/v1/sites/maple/reconciliations", ordersBackfill)
		require.Equal(w, 201, a.status, "%s", a.raw)
	}
	switch operation {
	case "pause", "resume":
		w.exec(`UPDATE backfill_control.request SET state = 'IN_PROGRESS', paused = $1`, operation == "resume")
	case "requestBackfill":
		w.exec(`UPDATE backfill_control.request SET state = 'REJECTED', closed_at = now()`)
	}
	require.Equal(w, 200, w.call(control.Admin, "PUT", "/api/v1/sites/maple/gates/load", `{"side":"school","kind":"sessions","limit":5}`).status)
	require.Equal(w, 201, w.call(control.Admin, "POST", "/api/v1/users", `{"name":"ann","password":"correct horse battery","role":"viewer"}`).status)
}

// driver makes requests of one operation.
type driver struct {
	*testing.T
	world *world
	*rand.Rand
	method, path string
	op           *openapi3.Operation
	params       openapi3.Parameters
	served       int
	plain        bool // nothing optional, and the first of what is known
}

type attempt struct {
	path   map[string]string
	query  url.Values
	header http.Header
	body   []byte
	wrong  string // what was done to it; "" when it fits the document
	must   bool   // whether that must be refused
}

// known are values that mean something here; schemas alone would rarely hit one.
var known = map[string][]any{
	"site": {"maple"}, "table": {"public.orders", "public.items"}, "from": {"school"}, "side": {"school", "central"}, "id": {1}, "seq": {1},
	"gate": {"load", "lag"}, "name": {"ann", "oak", "load"}, "key": {[]any{"1"}}, "from_key": {[]any{"2"}}, "revision": {7}, "kind": {"sessions"}, "state": {"waiting", "open", "equal", "lost", "PENDING"},
	"sides": {[]any{"left", "right"}}, "captured_from": {[]any{"school"}}, "conflict": {"quarantine"}, "mode": {"full"}, "account": {"test"},
	"password": {"correct horse battery"}, "sites": {map[string]any{"maple": "viewer"}}, "note": {"a note", "‘quoted’ <b>note</b>"}, "request": {1},
	"Idempotency-Key": {"k-1", "k-2", "k-3"}, "url": {"http://127.0.0.1:1/"}, "row": {map[string]any{"id": "1"}},
}

// slow are members that have an agent look, for which these requests do not wait.
var slow = map[string]bool{"mapping": true, "excluded": true, "cursor": true}

func (d *driver) request() attempt {
	a := attempt{path: map[string]string{}, query: url.Values{}, header: http.Header{"Authorization": {"Bearer " + secret(control.Admin)}}}
	for _, ref := range d.params {
		p := ref.Value
		if !p.Required && (d.plain || slow[p.Name] || d.IntN(3) > 0) {
			continue
		}
		v := d.value(p.Name, p.Schema.Value)
		switch p.In {
		case "path":
			a.path[p.Name] = fmt.Sprint(v)
		case "query":
			if list, ok := v.([]any); ok {
				for _, x := range list {
					a.query.Add(p.Name, fmt.Sprint(x))
				}
			} else {
				a.query.Set(p.Name, fmt.Sprint(v))
			}
		case "header":
			a.header.Set(p.Name, fmt.Sprint(v))
		}
	}
	if d.op.RequestBody != nil {
		a.body = d.encode(d.value("", d.schema()))
		a.header.Set("Content-Type", "application/json")
	}
	return a
}

func (d *driver) schema() *openapi3.Schema {
	return d.op.RequestBody.Value.Content.Get("application/json").Schema.Value
}

func (d *driver) encode(v any) []byte {
	raw, err := json.Marshal(v)
	require.NoError(d, err)
	return raw
}

// value is one that fits a schema.
func (d *driver) value(name string, s *openapi3.Schema) any {
	if values := known[name]; values != nil && (d.plain || d.IntN(10) > 0) {
		var fit []any
		for _, v := range values {
			if d.world.server.document.ValidateSchemaJSON(s, v) == nil {
				fit = append(fit, v)
			}
		}
		if d.plain && len(fit) > 0 {
			return fit[0]
		}
		if len(fit) > 0 {
			return fit[d.IntN(len(fit))]
		}
	}
	if len(s.OneOf) > 0 {
		return d.value(name, s.OneOf[d.IntN(len(s.OneOf))].Value)
	}
	if len(s.Enum) > 0 {
		return s.Enum[d.IntN(len(s.Enum))]
	}
	types := s.Type.Slice()
	if s.Items == nil { // an array of anything is a key
		types = slices.DeleteFunc(slices.Clone(types), func(name string) bool { return name == "array" })
	}
	switch types[d.IntN(len(types))] {
	case "object":
		out := map[string]any{}
		for member, ref := range sortedMembers(s) {
			if slices.Contains(s.Required, member) || (!d.plain && !slow[member] && d.IntN(2) == 0) {
				out[member] = d.value(member, ref)
			}
		}
		return out
	case "array":
		n := int(s.MinItems) + d.IntN(2)
		if s.MaxItems != nil {
			n = min(n, int(*s.MaxItems))
		}
		out := make([]any, max(n, 1))
		for i := range out {
			out[i] = d.value("", s.Items.Value)
		}
		return out
	case "integer":
		low, high := bounds(s)
		return low + d.Int64N(min(high-low, 1000)+1)
	case "number":
		low, high := bounds(s)
		return float64(low) + d.Float64()*float64(min(max(high-low, 1), 1000))*0.999 + 1e-9
	case "boolean":
		return d.IntN(2) == 0
	case "null":
		return nil
	}
	text := strings.Repeat([]string{"x", "é", "'", "表", "<i>"}[d.IntN(5)], int(max(s.MinLength, 1)))
	if s.Pattern != "" && !regexp.MustCompile(s.Pattern).MatchString(text) {
		text = "x"
	}
	return text
}

// sortedMembers keeps a seed's meaning: maps have no order.
func sortedMembers(s *openapi3.Schema) func(func(string, *openapi3.Schema) bool) {
	return func(yield func(string, *openapi3.Schema) bool) {
		names := make([]string, 0, len(s.Properties))
		for name := range s.Properties {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			if !yield(name, s.Properties[name].Value) {
				return
			}
		}
	}
}

func bounds(s *openapi3.Schema) (low, high int64) {
	low, high = 0, 1000
	if s.Min != nil {
		low = int64(*s.Min)
	}
	if s.Max != nil {
		high = int64(*s.Max)
	}
	return low, max(high, low)
}

// nasty are texts that have broken others.
var nasty = []string{"", " ", "\x00", "a\x00b", "\xff\xfe", "\xed\xa0\x80", "..", "../../../../etc/passwd", `..\..\windows`, "%2e%2e%2f", "'; DROP TABLE site; --", `" OR ""="`,
	"${jndi:ldap://x}", "{{7*7}}", "<script>alert(1)</script>", "\u202ehidden", "null", "-1", "0", "9223372036854775808", "1e309", "NaN", strings.Repeat("x", 5000), "\r\nSet-Cookie: a=b", "a/b", "a?b#c", "ﷺ"}

// bend makes a request wrong in one way.
func (d *driver) bend(a attempt) attempt {
	text := nasty[d.IntN(len(nasty))]
	ways := []func(){
		func() {
			a.wrong, a.must = "a parameter that is not there", true
			a.query.Set("no_such_parameter", text+"x")
		},
		func() {
			a.wrong, a.must = "a wrong token", true
			a.header.Set("Authorization", "Bearer "+strings.ToValidUTF8(strings.Map(printable, text), "")+"x")
		},
		func() { a.wrong, a.must = "no token", true; a.header.Del("Authorization") },
	}
	for _, ref := range d.params {
		p := ref.Value
		switch p.In {
		case "path":
			if p.Name != "table" || !strings.Contains(text, ".") {
				ways = append(ways, func() { a.wrong = fmt.Sprintf("%s in the path is %.50q", p.Name, text); a.path[p.Name] = text })
			}
		case "query":
			ways = append(ways, func() { a.wrong = fmt.Sprintf("%s is %.50q", p.Name, text); a.query[p.Name] = []string{text} })
			if p.Name == "cursor" {
				ways = append(ways, func() {
					a.wrong, a.must = "a cursor of nowhere", true
					a.query.Set("cursor", "AAAAAAAAAAL5VfISlONhAA")
				})
			}
			if p.Name == "limit" {
				ways = append(ways, func() { a.wrong, a.must = "a limit beyond all", true; a.query.Set("limit", "1001") })
			}
		case "header":
			if p.Name == "Idempotency-Key" {
				ways = append(ways, func() {
					a.wrong, a.must = "a long idempotency key", true
					a.header.Set(p.Name, strings.Repeat("k", 256))
				})
			}
		}
	}
	if d.op.RequestBody != nil {
		var body any
		require.NoError(d, json.Unmarshal(a.body, &body))
		raw := func(wrong string, b []byte) func() { return func() { a.wrong, a.must, a.body = wrong, true, b } }
		ways = append(ways,
			raw("half a body", a.body[:len(a.body)/2]),
			raw("two bodies", append(slices.Clone(a.body), a.body...)),
			raw("text that is not UTF-8", []byte("{\"note\":\"\xff\"}")),
			raw("a body of 2 MiB", bytes.Repeat([]byte(" "), 2<<20)),
			raw("a deep body", []byte(strings.Repeat(`{"a":`, 20000)+"1"+strings.Repeat("}", 20000))),
			raw("a deep list", []byte(strings.Repeat(`[`, 100000))),
			raw("null", []byte("null")), raw("a number", []byte("1e400")), raw("a text", []byte(`"x"`)),
			func() { a.wrong, a.must = "another media type", true; a.header.Set("Content-Type", "text/plain") },
			func() { a.wrong = "a member " + d.spoil(&body); a.body = d.encode(body) },
			func() { a.wrong = "a member " + d.spoil(&body); a.body = d.encode(body) },
			func() { a.wrong = "a member " + d.spoil(&body); a.body = d.encode(body) },
		)
		if object, ok := body.(map[string]any); ok {
			ways = append(ways, func() {
				a.wrong, a.must = "an unknown member", true
				object["no_such_member"] = text
				a.body = d.encode(object)
			})
			for _, name := range d.schema().Required {
				ways = append(ways, func() { a.wrong, a.must = "without "+name, true; delete(object, name); a.body = d.encode(object) })
			}
		}
	}
	ways[d.IntN(len(ways))]()
	if d.method == http.MethodGet && d.op.Security != nil { // open to all
		a.must = false
	}
	if d.op.OperationID == "tryMapping" && !a.must {
		return d.bend(d.request())
	}
	return a
}

func printable(r rune) rune {
	if r < 0x20 || r == 0x7f {
		return -1
	}
	return r
}

// spoil puts something else in one place of a body.
func (d *driver) spoil(v *any) string {
	switch inner := (*v).(type) {
	case map[string]any:
		if len(inner) > 0 && d.IntN(5) > 0 {
			names := make([]string, 0, len(inner))
			for name := range inner {
				names = append(names, name)
			}
			slices.Sort(names)
			name := names[d.IntN(len(names))]
			child := inner[name]
			said := d.spoil(&child)
			inner[name] = child
			return name + " " + said
		}
	case []any:
		if len(inner) > 0 && d.IntN(3) > 0 {
			i := d.IntN(len(inner))
			return fmt.Sprint(i, " ", d.spoil(&inner[i]))
		}
	}
	others := []any{nil, true, -1, 0, 1.5, 1e300, int64(1) << 62, "", "\x00", nasty[d.IntN(len(nasty))], []any{}, []any{nil}, map[string]any{}, map[string]any{"a": 1}, strings.Repeat("x", 20000)}
	*v = others[d.IntN(len(others))]
	return fmt.Sprintf("is %.50q", fmt.Sprint(*v))
}

// inside is what no answer may tell.
var inside = regexp.MustCompile(`SQLSTATE|pgx|pgconn|panic|goroutine|runtime error|\.go:\d|backfill_control\.|syntax error at|dial tcp|host=`)

func (d *driver) try(a attempt) {
	d.Helper()
	at := d.path
	for name, v := range a.path {
		at = strings.ReplaceAll(at, "{"+name+"}", strings.ReplaceAll(url.PathEscape(v), ".", "%2E"))
	}
	if len(a.query) > 0 {
		at += "?" + a.query.Encode()
	}
	r, err := http.NewRequestWithContext(d.Context(), d.method, d.world.url+at, bytes.NewReader(a.body))
	require.NoError(d, err)
	r.Header = a.header
	res, err := http.DefaultClient.Do(r)
	require.NoError(d, err)
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	require.NoError(d, err)
	what := fmt.Sprintf("%s %s %.300s\n%s\n%d %.500s", d.method, at, a.body, a.wrong, res.StatusCode, raw)

	answer := answer{status: res.StatusCode, header: res.Header, raw: raw}
	(&world{T: d.T, server: d.world.server}).conforms(r, answer)
	switch {
	case res.StatusCode < 400:
		require.NotNil(d, d.op.Responses.Status(res.StatusCode), "a status that the document does not have: %s", what)
		require.False(d, a.must, "this is taken: %s", what)
		d.served++
		return
	case res.StatusCode == http.StatusServiceUnavailable && d.op.OperationID == "tryMapping": // the agents are away
		d.served++
	default:
		require.Less(d, res.StatusCode, 500, what)
	}
	require.Equal(d, "application/problem+json", res.Header.Get("Content-Type"), what)
	var p Problem
	require.NoError(d, json.Unmarshal(raw, &p), what)
	kind, known := kinds[strings.TrimPrefix(p.Type, "urn:backfill:problem:")]
	require.True(d, known, what)
	require.Equal(d, kind.title, p.Title, what)
	require.Equal(d, res.StatusCode, p.Status, what)
	require.NotEmpty(d, p.Detail, what)
	require.NotEmpty(d, p.Instance, what)
	require.NotRegexp(d, inside, string(raw), what)
}
