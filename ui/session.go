package ui

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/labstack/echo/v4"

	"backfill/api"
	"backfill/internal/backfill"
)

type signInData struct {
	Next    string
	Problem string
}

// signIn asks for a token, checks it, and leaves it in a cookie that scripts cannot
// read and other sites cannot send. A link with a token in it, as printed on the
// terminal, signs in at once.
func (p *pages) signIn(c echo.Context) error {
	r := c.Request()
	c.Response().Header().Set("Referrer-Policy", "no-referrer") // the address may hold a token
	d := signInData{Next: local(c.FormValue("next"))}
	token := strings.TrimSpace(c.FormValue("token"))
	switch {
	case token == "" && r.Method == http.MethodPost:
		d.Problem = "Paste a token."
	case token == "":
		if _, err := p.Auth.Authenticate(r); err == nil {
			return c.Redirect(http.StatusSeeOther, d.Next)
		}
	case fromElsewhere(r):
		// Else any page could sign a visitor in under an account of its choice.
		d.Problem = "A link on another site cannot sign you in. Paste the token here."
	default:
		_, err := p.Auth.Account(r.Context(), token)
		if err == nil {
			c.SetCookie(p.cookie(c, token, int(p.SessionFor.Seconds())))
			return p.bounce(c, d.Next)
		}
		d.Problem = "Tokens cannot be checked now: the control database does not answer. Try again in a moment."
		if backfill.CodeOf(err) == backfill.Unauthorized {
			d.Problem = "This token is wrong or revoked."
		}
	}
	status := http.StatusOK
	if d.Problem != "" {
		status = http.StatusUnauthorized
	}
	return p.render(c, status, &view{template: "signin", Title: "Sign in", Data: d})
}

func (p *pages) signOut(c echo.Context) error {
	if !fromElsewhere(c.Request()) {
		c.SetCookie(p.cookie(c, "", -1))
	}
	return c.Redirect(http.StatusSeeOther, "/signin")
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
