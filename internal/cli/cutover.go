package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"backfill/api/client"
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

// resolve puts in what was left out and can mean only one thing.
func (f *tableFlags) resolve(ctx context.Context, s *session) (err error) {
	if f.Site, err = s.site(ctx, f.Site); err != nil {
		return err
	}
	f.Table, f.From, err = s.tableAndSide(ctx, f.Site, f.Table, f.From)
	return err
}

// errNotYet is a cutover that is refused: the clauses are printed already.
var errNotYet = backfill.Errorf(backfill.Refused, "reads may not move yet")

// CutoverAsk asks whether reads may move.
type CutoverAsk struct {
	Remote
	tableFlags
}

func (c *CutoverAsk) Run(ctx context.Context, s *session) error {
	if err := c.resolve(ctx, s); err != nil {
		return err
	}
	a, err := s.c.GetCutover(ctx, c.Site, c.Table, &client.GetCutoverParams{From: c.From})
	if err != nil {
		return err
	}
	if err := answer(s, a, s.showCutover); err != nil {
		return err
	}
	if !a.Value.ReadNew {
		return errNotYet
	}
	return nil
}

func (s *session) showCutover(v *client.Cutover) {
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
	if err := c.resolve(ctx, s); err != nil {
		return err
	}
	whole := func(d *time.Duration) *int {
		if d == nil {
			return nil
		}
		return new(int(*d / time.Second))
	}
	a, err := s.c.PutCutoverPolicy(ctx, c.Site, c.Table, client.PutCutoverPolicyJSONBody{From: c.From, Objective: c.Objective,
		SoakSeconds: whole(c.Soak), ProofAgeSeconds: whole(c.ProofAge), MaxLagSeconds: whole(c.MaxLag), SamplePerMinute: c.Sample})
	if err != nil {
		return err
	}
	return answer(s, a, func(v *client.Cutover) {
		p := v.Policy
		seconds := func(n int) string { return short(time.Duration(n) * time.Second) }
		s.out.printf("%s: under %s mismatches for %s, a reconciliation no older than %s, lag no more than %s, %v reads sampled a minute\n",
			v.Table, fmt.Sprintf("%.4g %%", 100*p.Objective), seconds(p.SoakSeconds), seconds(p.ProofAgeSeconds), seconds(p.MaxLagSeconds), p.SamplePerMinute)
	})
}

// CutoverShadow shows how shadow reads went.
type CutoverShadow struct {
	Remote
	tableFlags
}

func (c *CutoverShadow) Run(ctx context.Context, s *session) error {
	if err := c.resolve(ctx, s); err != nil {
		return err
	}
	a, err := s.c.GetShadow(ctx, c.Site, c.Table, &client.GetShadowParams{From: c.From})
	if err != nil {
		return err
	}
	return answer(s, a, func(v *client.Shadow) {
		if v.Since == nil {
			s.out.printf("%s: no shadow read was judged yet\n", v.Table)
			return
		}
		n := v.Reads
		s.out.printf("%s, since %s: %s match, %s stale, %s mismatch, %s unknown\n", v.Table, at(v.Since), thousands(n.Match), thousands(n.Stale), thousands(n.Mismatch), thousands(n.Unknown))
		s.out.printf("rate %s, at most %s at 95 %% confidence, the objective is %s\n", fmt.Sprintf("%.4g %%", 100*v.Rate), fmt.Sprintf("%.4g %%", 100*plain(v.Bound)), fmt.Sprintf("%.4g %%", 100*v.Objective))
		t := s.table("REPORTED", "KEY", "VERDICT", "SET ASIDE IN", "WHY")
		for _, o := range v.Odd {
			in := "–"
			if o.Reconciliation != nil {
				in = "reconciliation " + id(int64(*o.Reconciliation))
			}
			t.row(ago(&o.At), keyLine(o.Key), string(o.Verdict), in, o.Problem)
		}
		t.flush()
	})
}
