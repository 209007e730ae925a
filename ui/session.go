package ui

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/api"
	"backfill/internal/backfill"
)

type signInData struct {
	Name    string
	Link    string // to make the first account with
	Next    string
	Problem string
	Other   string // where somebody with an account elsewhere goes on, "" for nowhere
}

// signIn asks for a name and a password, or a token, and begins a session, whose id
// stays in a cookie that scripts cannot read and other sites cannot send. A link with a token in it, as printed on the
// terminal, signs in at once.
func (p *pages) signIn(c echo.Context) error {
	r := c.Request()
	c.Response().Header().Set("Referrer-Policy", "no-referrer") // the address may hold a token
	status := http.StatusOK
	d := signInData{Next: local(c.FormValue("next"))}
	d.Link = c.FormValue("link")
	d.Name = strings.TrimSpace(c.FormValue("name"))
	token, password := strings.TrimSpace(c.FormValue("token")), c.FormValue("password")
	nothing := token == "" && (d.Name == "" || password == "" || r.Method != http.MethodPost)
	switch {
	case nothing && r.Method == http.MethodPost:
		d.Problem = "Give a name and a password, or a token."
	case nothing && d.Link != "": // the form asks for the rest
	case nothing:
		if _, err := p.Auth.Authenticate(r); err == nil {
			return c.Redirect(http.StatusSeeOther, d.Next)
		}
	case fromElsewhere(r):
		// Else any page could sign a visitor in under an account of its choice.
		d.Problem = "A link on another site cannot sign you in. Sign in here."
	default:
		var id string
		var err error
		if d.Link != "" {
			id, err = p.service.FirstUser(r.Context(), d.Link, d.Name, password, p.Auth.Address(r), p.SessionFor)
		} else if token != "" {
			id, err = p.service.SignInByToken(r.Context(), token, p.Auth.Address(r), p.SessionFor)
		} else {
			id, err = p.service.SignIn(r.Context(), d.Name, password, p.Auth.Address(r), p.SessionFor)
		}
		if err == nil {
			return p.signedIn(c, id, d.Next)
		}
		status, d.Problem = p.refusal(err)
	}
	if d.Problem != "" && status == http.StatusOK {
		status = http.StatusUnauthorized
	}
	return p.askToSignIn(c, status, d)
}

// signedIn gives the browser its session.
func (p *pages) signedIn(c echo.Context, id, next string) error {
	p.endSession(c) // never the same id before and after
	c.SetCookie(p.cookie(c, id, int(p.SessionFor.Seconds())))
	return p.bounce(c, next)
}

// refusal is what to say to somebody who could not sign in.
func (p *pages) refusal(err error) (status int, problem string) {
	known := api.ProblemOf(err) // without the cause
	status = known.Status
	switch backfill.CodeOf(err) {
	case backfill.Unauthorized, backfill.Forbidden, backfill.TooMany, backfill.Invalid, backfill.Conflict:
		return status, capitalise(known.Detail) + "."
	}
	p.service.Log.Error("sign in", zap.Error(err))
	return status, "Nobody can sign in now: the control database does not answer. Try again in a moment."
}

func (p *pages) askToSignIn(c echo.Context, status int, d signInData) error {
	if p.Provider != nil && d.Link == "" {
		d.Other = "/signin/provider?next=" + url.QueryEscape(d.Next)
	}
	return p.render(c, status, &view{template: "signin", Title: "Sign in", Data: d})
}

func (p *pages) signOut(c echo.Context) error {
	if !fromElsewhere(c.Request()) {
		p.endSession(c)
		c.SetCookie(p.cookie(c, "", -1))
	}
	return c.Redirect(http.StatusSeeOther, "/signin")
}

// endSession ends the session that a request's cookie names.
func (p *pages) endSession(c echo.Context) {
	old, err := c.Cookie(api.SessionCookie)
	if err != nil || old.Value == "" {
		return
	}
	if err := p.service.EndSession(c.Request().Context(), old.Value); err != nil {
		p.service.Log.Warn("a session was not ended", zap.Error(err))
	}
}

func (p *pages) cookie(c echo.Context, value string, maxAge int) *http.Cookie {
	return &http.Cookie{Name: api.SessionCookie, Value: value, Path: "/", MaxAge: maxAge,
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: c.Scheme() == "https"}
}

// fromElsewhere reports whether a page of another site caused the request. A typed
// address or a link outside of a browser has no such page.
func fromElsewhere(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return true
	}
	return false
}

// toSignIn is the answer to somebody who is not signed in.
func (p *pages) toSignIn(c echo.Context) error {
	r := c.Request()
	if r.Header.Get(fragmentHeader) != "" {
		return c.NoContent(http.StatusUnauthorized)
	}
	if fromElsewhere(r) {
		// A link in a mail or a chat comes without the strict cookie though there may be
		// one: what this page of ours asks for next comes with it.
		return p.bounce(c, r.URL.RequestURI())
	}
	to := "/signin"
	if next := local(r.URL.RequestURI()); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	return c.Redirect(http.StatusSeeOther, to)
}

// bounce goes to a path of ours by way of a page of ours. A redirect would count
// as coming from wherever the first request came from, and leave out the cookie.
func (p *pages) bounce(c echo.Context, to string) error {
	return p.render(c, http.StatusOK, &view{template: "bounce", Title: "One moment", Data: local(to)})
}
