package ui

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/internal/backfill"
	"backfill/internal/oidc"
)

// ProviderReturn is where a sign-in provider sends people back to.
const ProviderReturn = "/signin/provider/return"

// flowCookie keeps an attempt to sign in at the provider in the browser that began
// it. It is lax: it has to come along when the provider's page leads back.
const flowCookie = "backfill_flow"

func (p *pages) flow(c echo.Context, value string, maxAge int) *http.Cookie {
	return &http.Cookie{Name: flowCookie, Value: value, Path: "/signin/provider", MaxAge: maxAge,
		HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: c.Scheme() == "https"}
}

// toProvider sends a browser to the sign-in provider.
func (p *pages) toProvider(c echo.Context) error {
	address, flow, err := p.Provider.Begin(c.Request().Context(), local(c.QueryParam("next")))
	if err != nil {
		return p.providerFailed(c, "/", err)
	}
	raw, err := json.Marshal(flow)
	if err != nil {
		return err
	}
	c.SetCookie(p.flow(c, base64.RawURLEncoding.EncodeToString(raw), 600))
	return c.Redirect(http.StatusSeeOther, address)
}

// fromProvider begins the session of whom the provider has sent back.
func (p *pages) fromProvider(c echo.Context) error {
	r := c.Request()
	c.Response().Header().Set("Referrer-Policy", "no-referrer") // the address holds a code
	var flow oidc.Flow
	if cookie, err := c.Cookie(flowCookie); err == nil {
		if raw, err := base64.RawURLEncoding.DecodeString(cookie.Value); err == nil {
			_ = json.Unmarshal(raw, &flow) // else it is empty, and refused as such
		}
	}
	c.SetCookie(p.flow(c, "", -1)) // good for once
	who, rights, err := p.Provider.Finish(r.Context(), flow, c.QueryParam("state"), c.QueryParam("code"))
	if err != nil {
		return p.providerFailed(c, flow.Next, err)
	}
	id, err := p.service.SignInAs(r.Context(), who, rights, p.Auth.Address(r), p.SessionFor)
	if err != nil {
		return p.providerFailed(c, flow.Next, err)
	}
	return p.signedIn(c, id, flow.Next)
}

func (p *pages) providerFailed(c echo.Context, next string, err error) error {
	d := signInData{Next: local(next)}
	var known *backfill.Error
	status := http.StatusServiceUnavailable
	if errors.As(err, &known) && known.Code == backfill.Unavailable {
		d.Problem = capitalise(known.Message) + "."
	} else {
		status, d.Problem = p.refusal(err)
	}
	if known != nil && known.Cause != nil {
		p.service.Log.Warn("sign in at the provider", zap.Error(known.Cause))
	}
	return p.askToSignIn(c, status, d)
}
