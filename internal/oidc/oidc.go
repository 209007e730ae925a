// Package oidc has people sign in at an OpenID Connect provider: authorization code
// with PKCE, state and nonce. What somebody may do comes from a claim of theirs.
package oidc

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// Config is what a Provider needs.
type Config struct {
	Issuer   string // its address, as it names itself
	ClientID string
	Secret   string // "" for a public client: PKCE alone
	Redirect string // our address that it sends people back to
	// Name is the claim that an account is named after when it is made. Default preferred_username.
	Name string
	// Groups is the claim with the groups that Grants go by, a list of texts or one text. Default groups.
	Groups string
	// Scopes are asked for beside openid. Default profile and email.
	Scopes []string
	Grants []Grant
}

// Grant gives a group's people a role, on a site or, "", on every site.
type Grant struct {
	Group string
	Role  control.Role
	Site  string
}

// UnmarshalText reads GROUP=ROLE or GROUP=ROLE@SITE.
func (g *Grant) UnmarshalText(text []byte) error {
	at := strings.LastIndex(string(text), "=")
	if at < 1 {
		return errors.New("write GROUP=ROLE or GROUP=ROLE@SITE, for example staff=viewer or maple-leads=reviewer@maple")
	}
	role, site, some := strings.Cut(string(text[at+1:]), "@")
	g.Group, g.Role, g.Site = string(text[:at]), control.Role(role), site
	if !control.Admin.Covers(g.Role) || !g.Role.Covers(control.Viewer) || some && site == "" {
		return fmt.Errorf("%s: the role is viewer, requester, reviewer or admin, and a site may follow as @SITE", text)
	}
	return nil
}

// Provider signs people in. It is asked for its keys and addresses when first needed:
// that it is away keeps nobody from signing in otherwise.
type Provider struct {
	Config
	mu    sync.Mutex
	found *oidc.Provider
}

// New makes a provider.
func New(c Config) *Provider {
	if c.Name == "" {
		c.Name = "preferred_username"
	}
	if c.Groups == "" {
		c.Groups = "groups"
	}
	if c.Scopes == nil {
		c.Scopes = []string{"profile", "email"}
	}
	return &Provider{Config: c}
}

// Flow is one attempt to sign in, kept by the browser that began it.
type Flow struct {
	State    string `json:"state"`
	Nonce    string `json:"nonce"`
	Verifier string `json:"verifier"`
	Next     string `json:"next"`
}

var impatient = &http.Client{Timeout: 10 * time.Second}

func (p *Provider) discover(ctx context.Context) (*oidc.Provider, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.found != nil {
		return p.found, nil
	}
	// The keys are fetched later under this context, which the request's end must not end.
	found, err := oidc.NewProvider(oidc.ClientContext(context.WithoutCancel(ctx), impatient), p.Issuer)
	if err != nil {
		return nil, &backfill.Error{Code: backfill.Unavailable, Message: "the sign-in provider does not answer: try again, or sign in with a password or a token", Cause: err}
	}
	p.found = found
	return found, nil
}

func (p *Provider) oauth(found *oidc.Provider) *oauth2.Config {
	return &oauth2.Config{ClientID: p.ClientID, ClientSecret: p.Secret, Endpoint: found.Endpoint(), RedirectURL: p.Redirect, Scopes: append([]string{oidc.ScopeOpenID}, p.Scopes...)}
}

// Begin returns where to send a browser, and what it is to keep until it comes back.
func (p *Provider) Begin(ctx context.Context, next string) (address string, f Flow, err error) {
	found, err := p.discover(ctx)
	if err != nil {
		return "", f, err
	}
	f = Flow{State: rand.Text(), Nonce: rand.Text(), Verifier: oauth2.GenerateVerifier(), Next: next}
	return p.oauth(found).AuthCodeURL(f.State, oidc.Nonce(f.Nonce), oauth2.S256ChallengeOption(f.Verifier)), f, nil
}

// Finish turns what a browser brings back into who it is and what they may do. It is
// Unauthorized when anything about it is wrong, and Forbidden without a grant.
func (p *Provider) Finish(ctx context.Context, f Flow, state, code string) (who control.Person, rights control.Rights, err error) {
	if f.State == "" || subtle.ConstantTimeCompare([]byte(f.State), []byte(state)) != 1 {
		return who, rights, wrong(errors.New("the state is not the one that was given out"))
	}
	found, err := p.discover(ctx)
	if err != nil {
		return who, rights, err
	}
	token, err := p.oauth(found).Exchange(oidc.ClientContext(ctx, impatient), code, oauth2.VerifierOption(f.Verifier))
	if err != nil {
		return who, rights, wrong(err)
	}
	raw, _ := token.Extra("id_token").(string)
	id, err := found.Verifier(&oidc.Config{ClientID: p.ClientID}).Verify(ctx, raw)
	if err != nil {
		return who, rights, wrong(err)
	}
	if f.Nonce == "" || subtle.ConstantTimeCompare([]byte(f.Nonce), []byte(id.Nonce)) != 1 {
		return who, rights, wrong(errors.New("the nonce is not the one that was given out"))
	}
	var claims map[string]any
	if err := id.Claims(&claims); err != nil {
		return who, rights, wrong(err)
	}
	name, _ := claims[p.Name].(string)
	who = control.Person{Issuer: id.Issuer, Subject: id.Subject, Name: name}
	rights = p.rights(texts(claims[p.Groups]))
	return who, rights, nil
}

// wrong is for whoever tries; the cause is for the log.
func wrong(cause error) error {
	return &backfill.Error{Code: backfill.Unauthorized, Message: "signing in there has failed, or took too long: try again", Cause: cause}
}

func texts(claim any) (out []string) {
	switch claim := claim.(type) {
	case string:
		return []string{claim}
	case []any:
		for _, x := range claim {
			if s, ok := x.(string); ok {
				out = append(out, s)
			}
		}
	}
	return out
}

// rights are the largest that groups have, on every site and on some.
func (p *Provider) rights(groups []string) (r control.Rights) {
	sites := map[string]control.Role{}
	for _, g := range p.Grants {
		switch {
		case !slices.Contains(groups, g.Group):
		case g.Site == "" && !r.Role.Covers(g.Role):
			r.Role = g.Role
		case g.Site != "" && !sites[g.Site].Covers(g.Role):
			sites[g.Site] = g.Role
		}
	}
	maps.DeleteFunc(sites, func(_ string, role control.Role) bool { return r.Role.Covers(role) })
	if len(sites) > 0 {
		r.Sites = sites
	}
	return r
}
