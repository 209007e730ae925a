// Package ui is the web pages: HTML written on the server, one style sheet, a few
// small scripts. A page shows what api.Service says; what a person decides on it
// goes to /api/v1 like anybody else's decisions.
package ui

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"
	"go.uber.org/zap"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/oidc"
)

// Options are what the pages can be told; the zero value is good.
type Options struct {
	// Auth tells whose token a session holds. Default: one of its own over the
	// service's store; sharing the API's spares lookups.
	Auth *api.Auth
	// AgentAway is how long an agent may be silent before the pages say that it is
	// away. Default 30 s; at less than an agent's cycle every agent looks away.
	AgentAway time.Duration
	// SessionFor is how long a browser keeps the session. Default 7 days; a revoked
	// token ends it at once.
	SessionFor time.Duration
	// Changes tells what has changed, so that a page many people look at is made once.
	// Default: none; each is made for itself.
	Changes *api.Changes
	// Provider signs people in who have no password here. Default: none.
	Provider *oidc.Provider
	// Now is the clock. Default time.Now.
	Now func() time.Time
}

type pages struct {
	service *api.Service
	Options
	assets    *assets
	templates templates
	shared    shared
}

// Mount adds the pages and their assets to an Echo that serves the API too: the
// scripts ask /api/v1 of the same origin.
func Mount(e *echo.Echo, s *api.Service, opts Options) {
	if opts.Auth == nil {
		opts.Auth = api.NewAuth(s.Store)
	}
	if opts.AgentAway == 0 {
		opts.AgentAway = 30 * time.Second
	}
	if opts.SessionFor == 0 {
		opts.SessionFor = 7 * 24 * time.Hour
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	p := &pages{service: s, Options: opts, assets: loadAssets()}
	p.templates = loadTemplates(p.assets, opts.Now)

	e.GET(p.assets.prefix+":name", p.assets.serve)
	e.GET("/favicon.ico", func(c echo.Context) error { return c.Redirect(http.StatusFound, p.assets.url("icon.svg")) })

	e.GET("/signin", p.signIn, p.headers)
	e.POST("/signin", p.signIn, p.headers)
	if opts.Provider != nil {
		e.GET("/signin/provider", p.toProvider, p.headers)
		e.GET(ProviderReturn, p.fromProvider, p.headers)
	}
	e.POST("/signout", p.signOut, p.headers)

	get := func(path string, h handler) { e.GET(path, p.page(h), p.headers) }
	get("/", p.sites)
	get("/sites/:site", p.tables)
	get("/sites/:site/queue", p.queue)
	get("/sites/:site/history", p.history)
	get("/sites/:site/row", p.life)
	get("/sites/:site/audit", p.audit)
	get("/backfills/:id", p.request)
	get("/sites/:site/proof", p.proof)
	get("/sites/:site/cutover", p.cutover)
	get("/reconciliations/:id", p.reconciliation)
	get("/sites", func(echo.Context, api.Account) (*view, error) { return nil, redirect("/") })
	get("/sites/*", nothing)
	get("/backfills/*", nothing)
	get("/reconciliations/*", nothing)
}

func nothing(c echo.Context, _ api.Account) (*view, error) {
	return nil, backfill.Errorf(backfill.NotFound, "there is no page %s", c.Request().URL.Path)
}

// policy lets a page use this server and nothing else. Styles and scripts stand in
// files of their own; there is no inline one to allow.
const policy = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

func (p *pages) headers(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		h := c.Response().Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		h.Add("Vary", fragmentHeader)
		return next(c)
	}
}

// view is what a template is given. Data is the page's own.
type view struct {
	template string
	Title    string
	Crumbs   []crumb
	Tabs     []tab
	Events   api.Topics // what the page shows: when it changes, the page is asked for again
	Refresh  int        // seconds after which it is asked for anyway, for what ages by itself
	Personal bool       // it says more about who looks than their role does
	Account  api.Account
	Data     any
}

// Stream is the address of the stream that says when the page should be asked for
// again, "" for none.
func (v *view) Stream() string {
	if v.Events.None() {
		return ""
	}
	return v.Events.Path()
}

type crumb struct{ Text, Href string }

type tab struct {
	Text, Href string
	Count      string // "" for none
	Current    bool
}

type handler func(echo.Context, api.Account) (*view, error)

// redirect is an error that a handler answers with when the page is elsewhere.
type redirect string

func (r redirect) Error() string { return "see " + string(r) }

// fragmentHeader asks for the changing part of a page alone.
const fragmentHeader = "Backfill-Fragment"

// page makes a handler's view into HTML for whoever is signed in.
func (p *pages) page(h handler) echo.HandlerFunc {
	return func(c echo.Context) error {
		account, err := p.Auth.Authenticate(c.Request())
		if backfill.CodeOf(err) == backfill.Unauthorized {
			return p.toSignIn(c)
		}
		if err == nil {
			r := c.Request()
			c.SetRequest(r.WithContext(account.WithOrigin(r.Context())))
			account, err = p.service.Place(r.Context(), account, c.Path(), c.Param)
		}
		if err == nil && p.Changes != nil && c.Request().Header.Get(fragmentHeader) != "" {
			return p.fragment(c, account, h)
		}
		var v *view
		if err == nil {
			v, err = h(c, account)
		}
		var to redirect
		if errors.As(err, &to) {
			return c.Redirect(http.StatusSeeOther, string(to))
		}
		status := http.StatusOK
		if err != nil {
			status, v = p.failure(c, err)
		}
		v.Account = account
		return p.render(c, status, v)
	}
}

func (p *pages) render(c echo.Context, status int, v *view) error {
	name := "page"
	if c.Request().Header.Get(fragmentHeader) != "" {
		name = "fragment"
	}
	// Into memory first: a template that fails must not leave half a page with status 200.
	var b bytes.Buffer
	if err := p.templates[v.template].ExecuteTemplate(&b, name, v); err != nil {
		return err
	}
	return whole(c, status, b.Bytes())
}

// whole answers with HTML of a known length, which goes out in one piece.
func whole(c echo.Context, status int, html []byte) error {
	c.Response().Header().Set(echo.HeaderContentLength, strconv.Itoa(len(html)))
	return c.HTMLBlob(status, html)
}

// failure is the page for an error, with what the API would say of it.
func (p *pages) failure(c echo.Context, err error) (int, *view) {
	problem := api.ProblemOf(err)
	d := struct{ Title, Message string }{problem.Title, capitalise(problem.Detail)}
	v := &view{template: "error", Title: problem.Title, Crumbs: []crumb{{"Sites", "/"}}}
	if problem.Status >= http.StatusInternalServerError {
		v.Refresh = 5
		if c.Request().Context().Err() == nil {
			p.service.Log.Error("page", zap.String("path", c.Request().URL.Path), zap.Error(err))
		}
	}
	if problem.Status == http.StatusInternalServerError {
		d.Title, d.Message = "This page could not be made", "The cause is in the server's log."
	}
	v.Data = d
	return problem.Status, v
}

// local keeps addresses on this server: a path, not another host's.
func local(path string) string {
	if !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//") || strings.ContainsAny(path, "\\\r\n\t") {
		return "/"
	}
	return path
}
