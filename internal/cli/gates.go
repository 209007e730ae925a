package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"backfill/api/client"
)

// Gate has the commands about gates.
type Gate struct {
	List   GateList   `cmd:"" group:"commands" default:"withargs" help:"List the gates of a site: what was last measured, and whether each is open."`
	Set    GateSet    `cmd:"" group:"commands" help:"Add a gate, or change it. Needs role admin."`
	Remove GateRemove `cmd:"" group:"commands" help:"Remove a gate. Needs role admin."`
	Apply  GateApply  `cmd:"" group:"commands" help:"Make the gates of a YAML file those of a site, and remove all others. Needs role admin."`
}

func (s *session) showGates(p *client.Page[client.Gate]) {
	t := s.table("GATE", "SIDE", "TABLE", "KIND", "STATE", "MEASURED", "WHY")
	for _, g := range p.Data {
		t.row(g.Name, g.Side, cmp.Or(plain(g.Table), "all"), string(g.Kind), string(g.State), ago(g.MeasuredAt), g.Why)
	}
	t.flush()
	if len(p.Data) == 0 {
		s.note.printf("none: backfills go as fast as their pages let them; backfill gate set adds one\n")
	}
}

// GateList lists the gates of a site.
type GateList struct {
	Remote
	OneSite
}

func (c *GateList) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	a, err := s.c.ListGates(ctx, site)
	if err != nil {
		return err
	}
	return answer(s, a, s.showGates)
}

// GateSet adds or changes a gate.
type GateSet struct {
	Remote
	OneSite
	Name   string        `arg:"" help:"The gate's name: 1 to 40 of a-z, 0-9, '_', '.' and '-'."`
	Side   string        `required:"" placeholder:"SIDE" help:"The side whose agent measures."`
	Kind   string        `required:"" placeholder:"KIND" help:"What is measured: replica_lag, sessions, archiver, slot_wal, queue_depth, sql, http, prometheus; or rows_per_second, a fixed limit."`
	Limit  float64       `placeholder:"N" help:"Open up to this, closed above. Seconds for replica_lag, bytes for slot_wal."`
	Table  string        `placeholder:"TABLE" help:"For backfills of this table only. Default: all of the site."`
	URL    string        `name:"url" placeholder:"URL" help:"Address of an http gate (200 is open, 429 and 503 are closed), or of Prometheus."`
	Query  string        `placeholder:"QUERY" help:"SQL that returns one number, or a Prometheus query."`
	MaxAge time.Duration `placeholder:"DURATION" help:"How old a reading may be; one that is older counts as closed. Default: 10s."`
}

func (c *GateSet) Help() string {
	return `Before each page of a walk and each batch of a release all gates of the site and table are asked. While one is closed
nothing is read or written; the backfill says why it waits and goes on by itself. A gate that cannot be measured is closed.

    backfill gate set lag --side central --kind replica_lag --limit 5
    backfill gate set cpu --side school --kind prometheus --url http://prometheus:9090 --limit 0.7 --query 'avg(rate(node_cpu_seconds_total{mode!="idle",instance="db1:9100"}[1m]))'
    backfill gate set night --side school --kind sql --limit 0 --query "SELECT (extract(hour FROM now() AT TIME ZONE 'Europe/Berlin') BETWEEN 7 AND 20)::int"
    backfill gate set slow --side school --kind rows_per_second --limit 2000 --table public.orders`
}

func (c *GateSet) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	a, err := s.c.PutGate(ctx, site, c.Name, client.GateDefinition{Side: c.Side, Kind: client.GateKind(c.Kind), Limit: &c.Limit,
		Table: given(c.Table), URL: given(c.URL), Query: given(c.Query), MaxAge: given(c.MaxAge.Seconds())})
	if err != nil {
		return err
	}
	return answer(s, a, func(g *client.Gate) { s.out.printf("gate %s of site %s: %s\n", g.Name, site, g.Why) })
}

// GateRemove removes a gate.
type GateRemove struct {
	Remote
	OneSite
	Name string `arg:"" help:"The gate's name."`
}

func (c *GateRemove) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	if _, err := s.c.DeleteGate(ctx, site, c.Name); err != nil {
		return err
	}
	s.out.printf("gate %s of site %s is removed\n", c.Name, site)
	return nil
}

// GateApply makes a site's gates those of a file.
type GateApply struct {
	Remote
	OneSite
	File string `short:"f" required:"" placeholder:"FILE" help:"The YAML file; - reads standard input."`
}

func (c *GateApply) Help() string {
	return `The file has the fields of backfill gate set:

    gates:
      - {name: lag, side: central, kind: replica_lag, limit: 5}
      - {name: load, side: school, kind: sessions, limit: 20, table: public.orders}`
}

func (c *GateApply) Run(ctx context.Context, s *session) error {
	text, err := readFile(c.File)
	if err != nil {
		return err
	}
	var file struct {
		Gates []map[string]any `yaml:"gates"`
		Rest  map[string]any   `yaml:",inline"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		return usagef("%s: %v", c.File, err)
	}
	for name := range file.Rest {
		return usagef("%s: %s is not known: a file of gates has a list named gates", c.File, name)
	}
	if file.Gates == nil {
		return usagef("%s: it has no list named gates; write gates: [] to remove all", c.File)
	}
	var body client.ReplaceGatesJSONBody
	if err := fill(&body.Gates, file.Gates); err != nil {
		return usagef("%s: %v", c.File, err)
	}
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	a, err := s.c.ReplaceGates(ctx, site, body)
	if err != nil {
		return err
	}
	return answer(s, a, s.showGates)
}

func readFile(name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(os.Stdin)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read the file: %w", err)
	}
	return text, nil
}

// fill puts what a file says into a body of the API, and refuses what it has no place for.
func fill(body, file any) error {
	raw, err := json.Marshal(file)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	err = dec.Decode(body)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		return fmt.Errorf("%s is no %s", wrong.Field, wrong.Value)
	case err != nil:
		return errors.New(strings.TrimPrefix(err.Error(), "json: ")) // unknown field "x"
	}
	return nil
}
