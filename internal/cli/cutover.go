package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"backfill/internal/backfill"
)

// Cutover says whether the reads of a table may move, and has what belongs to that.
type Cutover struct {
	Ask    CutoverAsk    `cmd:"" group:"commands" default:"withargs" help:"Say whether reads may move, and if not, why (the default). Succeeds only on yes."`
	Set    CutoverSet    `cmd:"" group:"commands" help:"Set what has to hold before reads move. Needs role admin."`
	Shadow CutoverShadow `cmd:"" group:"commands" help:"Show how the shadow reads of a table went, and which mismatched."`
}

// tableFlags name a table and the side that has the rows.
type tableFlags struct {
	Site  string `placeholder:"SITE" help:"The site. May be left out when there is only one."`
	Table string `placeholder:"TABLE" help:"The table, as schema.table. May be left out when the site has only one."`
	From  string `placeholder:"SIDE" help:"The side that has the rows. May be left out when the table is captured from only one."`
}

// path is the address of something of the table, and the side.
func (f *tableFlags) path(ctx context.Context, s *session, what string) (path, from string, err error) {
	site, err := s.site(ctx, f.Site)
	if err != nil {
		return "", "", err
	}
	table, from, err := s.tableAndSide(ctx, site, f.Table, f.From)
	return sitePath(site, "tables", table, what), from, err
}

// cutover is an answer as the API shows it.
type cutover struct {
	ReadNew bool                 `json:"read_new"`
	Clauses []backfill.Condition `json:"clauses"`
	Table   string               `json:"table"`
	From    string               `json:"from"`
	To      string               `json:"to"`
	Waived  []backfill.Waived    `json:"waived"`
	Policy  struct {
		Objective float64 `json:"objective"`
		Soak      int64   `json:"soak_seconds"`
		ProofAge  int64   `json:"proof_age_seconds"`
		MaxLag    int64   `json:"max_lag_seconds"`
		Sample    int     `json:"sample_per_minute"`
	} `json:"policy"`
}

// errNotYet is a cutover that is refused: the clauses are printed already.
var errNotYet = backfill.Errorf(backfill.Refused, "reads may not move yet")

// CutoverAsk asks whether reads may move.
type CutoverAsk struct {
	Remote
	tableFlags
}

func (c *CutoverAsk) Run(ctx context.Context, s *session) error {
	path, from, err := c.path(ctx, s, "cutover")
	if err != nil {
		return err
	}
	raw, err := s.c.call(ctx, http.MethodGet, path+"?"+filters("from", from).Encode(), nil)
	if err != nil {
		return err
	}
	v, err := decode[*cutover](raw)
	if err != nil {
		return err
	}
	if err := answer(s, raw, s.showCutover); err != nil {
		return err
	}
	if !v.ReadNew {
		return errNotYet
	}
	return nil
}

func (s *session) showCutover(v *cutover) {
	s.out.printf("%s: may reads move from %s to %s? %s\n", v.Table, v.From, v.To, map[bool]string{true: "yes", false: "no"}[v.ReadNew])
	// No table: that would cut what to do short.
	for _, c := range v.Clauses {
		s.out.printf("  %s %s %s\n", fmt.Sprintf("%-3s", map[bool]string{true: "yes", false: "no"}[c.OK]), fmt.Sprintf("%-10s", c.Name), c.Message)
	}
	for _, w := range v.Waived {
		s.out.printf("waived: %v keys by %s: %s\n", w.Keys, w.By, w.Note)
	}
}

// CutoverSet sets what a cutover needs.
type CutoverSet struct {
	Remote
	tableFlags
	Objective *float64       `placeholder:"RATE" help:"The mismatch rate that shadow reads have to stay under, for example 0.0001."`
	Soak      *time.Duration `placeholder:"TIME" help:"For how long, at least 1m, for example 24h."`
	ProofAge  *time.Duration `name:"proof-age" placeholder:"TIME" help:"How old the last full reconciliation may be, for example 24h."`
	MaxLag    *time.Duration `name:"max-lag" placeholder:"TIME" help:"How long a change may wait, for example 30s."`
	Sample    *int           `placeholder:"N" help:"How many reads a minute the agent makes by itself; 0 for none."`
}

// Validate is kong's hook for what a flag's type cannot say.
func (c *CutoverSet) Validate() error {
	if c.Objective == nil && c.Soak == nil && c.ProofAge == nil && c.MaxLag == nil && c.Sample == nil {
		return errors.New("give what to set: --objective, --soak, --proof-age, --max-lag or --sample")
	}
	return nil
}

func (c *CutoverSet) Run(ctx context.Context, s *session) error {
	path, from, err := c.path(ctx, s, "cutover")
	if err != nil {
		return err
	}
	whole := func(d *time.Duration) *int64 {
		if d == nil {
			return nil
		}
		n := int64(*d / time.Second)
		return &n
	}
	raw, err := s.c.call(ctx, http.MethodPut, path, struct {
		From      string   `json:"from"`
		Objective *float64 `json:"objective,omitempty"`
		Soak      *int64   `json:"soak_seconds,omitempty"`
		ProofAge  *int64   `json:"proof_age_seconds,omitempty"`
		MaxLag    *int64   `json:"max_lag_seconds,omitempty"`
		Sample    *int     `json:"sample_per_minute,omitempty"`
	}{from, c.Objective, whole(c.Soak), whole(c.ProofAge), whole(c.MaxLag), c.Sample})
	if err != nil {
		return err
	}
	return answer(s, raw, func(v *cutover) {
		p := v.Policy
		seconds := func(n int64) string { return short(time.Duration(n) * time.Second) }
		s.out.printf("%s: under %s mismatches for %s, a reconciliation no older than %s, lag no more than %s, %v reads sampled a minute\n",
			v.Table, fmt.Sprintf("%.4g %%", 100*p.Objective), seconds(p.Soak), seconds(p.ProofAge), seconds(p.MaxLag), p.Sample)
	})
}

// CutoverShadow shows how shadow reads went.
type CutoverShadow struct {
	Remote
	tableFlags
}

func (c *CutoverShadow) Run(ctx context.Context, s *session) error {
	path, from, err := c.path(ctx, s, "shadow")
	if err != nil {
		return err
	}
	raw, err := s.c.call(ctx, http.MethodGet, path+"?"+filters("from", from).Encode(), nil)
	if err != nil {
		return err
	}
	return answer(s, raw, func(v struct {
		Table     string                `json:"table"`
		Since     *time.Time            `json:"since"`
		Reads     backfill.ShadowCounts `json:"reads"`
		Rate      float64               `json:"rate"`
		Bound     float64               `json:"bound"`
		Objective float64               `json:"objective"`
		Odd       []struct {
			At             *time.Time   `json:"at"`
			Key            backfill.Key `json:"key"`
			Verdict        string       `json:"verdict"`
			Problem        string       `json:"problem"`
			Reconciliation *int64       `json:"reconciliation"`
		} `json:"odd"`
	}) {
		if v.Since == nil {
			s.out.printf("%s: no shadow read was judged yet\n", v.Table)
			return
		}
		n := v.Reads
		s.out.printf("%s, since %s: %s match, %s stale, %s mismatch, %s unknown\n", v.Table, at(v.Since), thousands(n.Match), thousands(n.Stale), thousands(n.Mismatch), thousands(n.Unknown))
		s.out.printf("rate %s, at most %s at 95 %% confidence, the objective is %s\n", fmt.Sprintf("%.4g %%", 100*v.Rate), fmt.Sprintf("%.4g %%", 100*v.Bound), fmt.Sprintf("%.4g %%", 100*v.Objective))
		t := s.table("REPORTED", "KEY", "VERDICT", "SET ASIDE IN", "WHY")
		for _, o := range v.Odd {
			in := "–"
			if o.Reconciliation != nil {
				in = "reconciliation " + id(*o.Reconciliation)
			}
			t.row(ago(o.At), o.Key.String(), o.Verdict, in, o.Problem)
		}
		t.flush()
	})
}
