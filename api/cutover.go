package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Cutover reads whether the reads of a table may move, and why not. Nothing is put on
// record: pages ask again and again.
func (s *Service) Cutover(ctx context.Context, site, table, from string) (*backfill.Cutover, error) {
	return s.Store.Cutover(ctx, site, table, from)
}

// AskCutover is Cutover for somebody who is going to act on the answer: it is put on
// record under their name, when it is another than the last time.
func (s *Service) AskCutover(ctx context.Context, a Account, site, table, from string) (*backfill.Cutover, error) {
	c, err := s.Store.Cutover(ctx, site, table, from)
	if err != nil {
		return nil, err
	}
	return c, s.Store.Answered(ctx, a.Name, c)
}

// SetPolicy changes what has to hold before the reads of a table move.
func (s *Service) SetPolicy(ctx context.Context, a Account, site, table, from string, c control.PolicyChange) error {
	if err := a.needs(control.Admin, "setting what a cutover needs"); err != nil {
		return err
	}
	p, err := s.Store.Panel(ctx, site, table, from)
	if err != nil {
		return err
	}
	if !p.Table.Captures(from) {
		return backfill.Errorf(backfill.Refused, "changes of %s are not captured from %s", p.Table.Name, from)
	}
	return s.Store.PutPolicy(ctx, a.Name, p.Direction, &p.Table, c)
}

type becauseJSON struct {
	Clause  string `json:"clause"`
	Message string `json:"message"`
}

type policyJSON struct {
	Objective float64 `json:"objective"`
	Soak      int64   `json:"soak_seconds"`
	ProofAge  int64   `json:"proof_age_seconds"`
	MaxLag    int64   `json:"max_lag_seconds"`
	Sample    int     `json:"sample_per_minute"`
	SetBy     *string `json:"set_by"` // null: the defaults
}

type cutoverJSON struct {
	ReadNew   bool                 `json:"read_new"`
	Because   []becauseJSON        `json:"because"` // the clauses that do not hold
	Clauses   []backfill.Condition `json:"clauses"`
	Site      string               `json:"site"`
	Table     string               `json:"table"`
	From      string               `json:"from"`
	To        string               `json:"to"`
	CheckedAt time.Time            `json:"checked_at"`
	Proof     *int64               `json:"proof"` // the reconciliation it rests on
	Waived    []backfill.Waived    `json:"waived"`
	Shadow    soakJSON             `json:"shadow"`
	Policy    policyJSON           `json:"policy"`
}

func showCutover(c *backfill.Cutover) cutoverJSON {
	p, d := c.Policy, c.Panel.Direction
	out := cutoverJSON{ReadNew: c.ReadNew(), Because: []becauseJSON{}, Clauses: c.Clauses(), Site: d.Site, Table: c.Panel.Table.Name, From: d.From, To: d.To, CheckedAt: c.Now,
		Waived: orEmpty(c.Waived), Shadow: showSoak(c),
		Policy: policyJSON{p.Objective, int64(p.Soak / time.Second), int64(p.ProofAge / time.Second), int64(p.MaxLag / time.Second), p.Sample, orNull(p.SetBy)}}
	for _, no := range backfill.Unmet(out.Clauses) {
		out.Because = append(out.Because, becauseJSON{no.Name, no.Message})
	}
	if c.Proof != nil {
		out.Proof = &c.Proof.ID
	}
	return out
}

func (s *Server) getCutover(c echo.Context) error {
	v, err := s.service.AskCutover(c.Request().Context(), accountOf(c), c.Param("site"), c.Param("table"), c.QueryParam("from"))
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showCutover(v))
}

func (s *Server) putPolicy(c echo.Context) error {
	var in struct {
		From      string   `json:"from"`
		Objective *float64 `json:"objective"`
		Soak      *int64   `json:"soak_seconds"`
		ProofAge  *int64   `json:"proof_age_seconds"`
		MaxLag    *int64   `json:"max_lag_seconds"`
		Sample    *int     `json:"sample_per_minute"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	spell := func(seconds *int64) *time.Duration {
		if seconds == nil {
			return nil
		}
		d := time.Duration(*seconds) * time.Second
		return &d
	}
	ctx, site, table := c.Request().Context(), c.Param("site"), c.Param("table")
	if err := s.service.SetPolicy(ctx, accountOf(c), site, table, in.From, control.PolicyChange{
		Objective: in.Objective, Soak: spell(in.Soak), ProofAge: spell(in.ProofAge), MaxLag: spell(in.MaxLag), Sample: in.Sample}); err != nil {
		return err
	}
	v, err := s.service.Cutover(ctx, site, table, in.From)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, showCutover(v))
}
