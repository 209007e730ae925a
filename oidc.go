package main

import (
	"errors"
	"strings"

	"backfill/internal/oidc"
	"backfill/ui"
)

// oidcFlags name an OpenID Connect provider that people may sign in at.
type oidcFlags struct {
	Issuer string       `placeholder:"URL" help:"An OpenID Connect provider that people may sign in at. Needs --public-url: there it has to send them back to URL/signin/provider/return. Default: none."`
	Client string       `placeholder:"ID" help:"What this program is called there."`
	Secret string       `env:"BACKFILL_OIDC_SECRET" secret:"" placeholder:"SECRET" help:"Its secret there, best in the environment. Default: none, which a public client has."`
	Name   string       `default:"preferred_username" placeholder:"CLAIM" help:"The claim that accounts are named after (${default})."`
	Groups string       `default:"groups" placeholder:"CLAIM" help:"The claim with a person's groups (${default})."`
	Scope  []string     `default:"profile,email" placeholder:"SCOPE" help:"What is asked for beside openid (${default})."`
	Role   []oidc.Grant `sep:"none" placeholder:"GROUP=ROLE[@SITE]" help:"The role of a group's people, on every site or on one; may be repeated. Whoever has none cannot sign in."`
}

func (f *oidcFlags) check(publicURL string) error {
	switch {
	case f.Issuer == "":
		return nil
	case publicURL == "":
		return errors.New("--oidc-issuer needs --public-url: the provider sends people back there")
	case f.Client == "":
		return errors.New("--oidc-issuer needs --oidc-client")
	case len(f.Role) == 0:
		return errors.New("--oidc-issuer needs an --oidc-role: nobody could sign in there")
	}
	return nil
}

// provider is nil when none is named.
func (f *oidcFlags) provider(publicURL string) *oidc.Provider {
	if f.Issuer == "" {
		return nil
	}
	return oidc.New(oidc.Config{Issuer: f.Issuer, ClientID: f.Client, Secret: f.Secret, Name: f.Name, Groups: f.Groups, Scopes: f.Scope, Grants: f.Role,
		Redirect: strings.TrimRight(publicURL, "/") + ui.ProviderReturn})
}
