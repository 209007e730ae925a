package pace

import (
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Kind says what a gate measures.
type Kind string

// The kinds of gates. All but HTTP and RowsPerSecond compare a number with the
// gate's limit: at the limit they are open, above it closed.
const (
	ReplicaLag    Kind = "replica_lag"     // seconds that the side's slowest replica is behind
	Sessions      Kind = "sessions"        // sessions of others that run a statement on the side
	Archiver      Kind = "archiver"        // WAL files of the side that wait to be archived
	SlotWAL       Kind = "slot_wal"        // bytes of WAL that the side keeps for its slowest replication slot
	QueueDepth    Kind = "queue_depth"     // changes sent by the side and not yet applied by the other
	SQL           Kind = "sql"             // the number that a query on the side returns
	HTTP          Kind = "http"            // an address: 200 is open, 429 and 503 are closed
	Prometheus    Kind = "prometheus"      // the number that a Prometheus query returns
	RowsPerSecond Kind = "rows_per_second" // never closes: the most rows a walk or a release handles in a second
)

// Kinds lists every kind.
func Kinds() []Kind {
	return []Kind{ReplicaLag, Sessions, Archiver, SlotWAL, QueueDepth, SQL, HTTP, Prometheus, RowsPerSecond}
}

// DefaultMaxAge is how old a reading may be before its gate counts as closed.
const DefaultMaxAge = 10 * time.Second

// Gate holds back walks, releases and reconciliations while a database has enough to
// do already.
type Gate struct {
	Name  string  `json:"name"`
	Side  string  `json:"side"`            // whose agent measures, and, where a database is measured, whose
	Table string  `json:"table,omitempty"` // for backfills of this table only; "" for all of the site
	Kind  Kind    `json:"kind"`
	Limit float64 `json:"limit"`
	// URL is the address of an http gate, or the base address of a prometheus gate's server.
	URL string `json:"url,omitempty"`
	// Query is the SQL of a sql gate, or the PromQL of a prometheus gate.
	Query string `json:"query,omitempty"`
	// MaxAge is how many seconds old a reading may be; default 10.
	MaxAge float64 `json:"max_age,omitempty"`
}

// Reading is what was last measured for a gate.
type Reading struct {
	Value   float64
	Problem string        // why there is no value, "" when there is one
	Age     time.Duration // by the control database's clock
}

// Verdict is what a gate says.
type Verdict struct {
	Open bool
	Why  string // what was measured, and why that closes the gate if it does
	// Reason is why it is closed in words that stay the same from one reading to the
	// next, "" when it is open.
	Reason string
}

var gateName = regexp.MustCompile(`^[a-z0-9][a-z0-9_.-]{0,39}$`)

// Check returns what is wrong with a gate's definition by field, or "" twice.
func (g *Gate) Check() (field, problem string) {
	switch {
	case !gateName.MatchString(g.Name):
		return "name", "use 1 to 40 of a-z, 0-9, '_', '.' and '-', beginning with a letter or digit"
	case g.Side == "":
		return "side", "name the side whose agent is to measure it"
	case math.IsNaN(g.Limit) || math.IsInf(g.Limit, 0) || g.Limit < 0:
		return "limit", "must be a number that is not negative"
	case g.Kind == RowsPerSecond && g.Limit < 1:
		return "limit", "must be at least 1 row per second; to hold a backfill, pause it"
	case g.MaxAge < 0 || g.MaxAge > 3600 || math.IsNaN(g.MaxAge):
		return "max_age", "must be a number of seconds up to 3600"
	}
	switch g.Kind {
	case ReplicaLag, Sessions, Archiver, SlotWAL, QueueDepth, RowsPerSecond:
		if g.URL != "" || g.Query != "" {
			return "query", "a gate of kind " + string(g.Kind) + " takes neither url nor query"
		}
	case SQL:
		if strings.TrimSpace(g.Query) == "" || g.URL != "" {
			return "query", "a sql gate needs a query that returns one number, and no url"
		}
	case HTTP:
		if g.Query != "" {
			return "query", "an http gate takes no query"
		}
		return "url", checkURL(g.URL)
	case Prometheus:
		if strings.TrimSpace(g.Query) == "" {
			return "query", "a prometheus gate needs a query that returns one number"
		}
		return "url", checkURL(g.URL)
	default:
		return "kind", fmt.Sprintf("must be one of %v", Kinds())
	}
	return "", ""
}

func checkURL(address string) string {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return "write it like http://host:port/path"
	case u.User != nil:
		return "must not hold a password: everybody who may look at gates can read it"
	}
	return ""
}

func (g *Gate) maxAge() time.Duration {
	if g.MaxAge == 0 {
		return DefaultMaxAge
	}
	return time.Duration(g.MaxAge * float64(time.Second))
}

// Measured reports whether the gate needs readings at all.
func (g *Gate) Measured() bool { return g.Kind != RowsPerSecond }

// Judge says whether a gate is open after its last reading, nil when there was
// none. Only a reading that is known, fresh and within the limit opens it.
func (g *Gate) Judge(r *Reading) Verdict {
	what := g.what()
	closed := func(reason, more string) Verdict { return Verdict{Why: reason + more, Reason: reason} }
	switch {
	case !g.Measured():
		return Verdict{Open: true, Why: "at most " + number(g.Limit) + " rows a second"}
	case r == nil:
		return closed(what+" has not been measured yet: the agent of "+g.Side+" does within seconds, when it runs", "")
	case r.Age > g.maxAge():
		return closed(fmt.Sprintf("%s was not measured for more than %s: is the agent of %s running?", what, g.maxAge(), g.Side),
			fmt.Sprintf(" The last time was %s ago.", r.Age.Round(time.Second)))
	case r.Problem != "":
		return closed(what+" cannot be measured: "+r.Problem, "")
	case math.IsNaN(r.Value):
		return closed(what+" is not a number", "")
	case g.Kind == HTTP && r.Value != 200:
		return closed(fmt.Sprintf("%s answers %.0f", what, r.Value), "")
	case g.Kind == HTTP:
		return Verdict{Open: true, Why: what + " answers 200"}
	case r.Value > g.Limit:
		return closed(fmt.Sprintf("%s is over the limit of %s", what, g.show(g.Limit)), ": it is "+g.show(r.Value))
	}
	return Verdict{Open: true, Why: fmt.Sprintf("%s is %s, the limit is %s", what, g.show(r.Value), g.show(g.Limit))}
}

// what names the thing measured, for people.
func (g *Gate) what() string {
	of := map[Kind]string{
		ReplicaLag: "replica lag of " + g.Side,
		Sessions:   "number of running sessions on " + g.Side,
		Archiver:   "backlog of the WAL archiver of " + g.Side,
		SlotWAL:    "WAL kept by " + g.Side + " for replication slots",
		QueueDepth: "queue of changes from " + g.Side,
	}[g.Kind]
	if of == "" {
		of = "gate " + g.Name
	}
	return of
}

func (g *Gate) show(v float64) string {
	switch g.Kind {
	case ReplicaLag:
		return strconv.FormatFloat(v, 'f', 1, 64) + " s"
	case Archiver:
		return number(v) + " files"
	case SlotWAL:
		return strconv.FormatFloat(v/(1<<20), 'f', 1, 64) + " MiB"
	}
	return number(v)
}

func number(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1e15 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// Rate spreads rows over time so that no more than a number of them are handled
// in a second, over any stretch longer than one page.
type Rate struct {
	due time.Time // when the rows handled so far are paid for
}

// Spent records that rows were handled by now at perSecond; 0 is no limit.
func (r *Rate) Spent(now time.Time, rows int64, perSecond float64) {
	if perSecond <= 0 {
		r.due = time.Time{}
		return
	}
	if r.due.Before(now) {
		r.due = now // time not used is not saved up
	}
	r.due = r.due.Add(time.Duration(float64(rows) / perSecond * float64(time.Second)))
}

// Wait is how long the next page has to wait.
func (r *Rate) Wait(now time.Time) time.Duration { return max(r.due.Sub(now), 0) }
