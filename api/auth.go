package api

import (
	"context"
	"crypto/sha256"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// SessionCookie holds the token of someone who signed in on the web pages. Whoever
// sets it makes it HttpOnly and SameSite=Strict.
const SessionCookie = "backfill_session"

// Auth tells whose token a request carries. Lookups are remembered for a moment,
// so that a revoked token stays valid no longer than that.
type Auth struct {
	lookup func(ctx context.Context, secret string) (control.Identity, error)

	mu    sync.Mutex
	known map[[sha256.Size]byte]remembered // by hash: secrets are not kept
}

type remembered struct {
	identity control.Identity
	until    time.Time
}

const (
	rememberFor = 3 * time.Second
	rememberMax = 10_000
)

// NewAuth looks accounts up with a function such as control.Store.Account.
func NewAuth(lookup func(ctx context.Context, secret string) (control.Identity, error)) *Auth {
	return &Auth{lookup: lookup, known: map[[sha256.Size]byte]remembered{}}
}

// Account returns whose token a secret is, or Unauthorized.
func (a *Auth) Account(ctx context.Context, secret string) (control.Identity, error) {
	hash := sha256.Sum256([]byte(secret))
	a.mu.Lock()
	r, ok := a.known[hash]
	a.mu.Unlock()
	if ok && time.Now().Before(r.until) {
		return r.identity, nil
	}
	i, err := a.lookup(ctx, secret)
	if err != nil {
		return i, err
	}
	r = remembered{i, time.Now().Add(rememberFor)}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.known) >= rememberMax {
		clear(a.known)
	}
	a.known[hash] = r
	return i, nil
}

// Authenticate returns the account of a request's bearer token or session cookie,
// or Unauthorized. A cookie that comes along with a request another site's page
// may have made is Forbidden unless the request only reads.
func (a *Auth) Authenticate(r *http.Request) (Account, error) {
	secret, cookie, err := secretOf(r)
	if err != nil {
		return Account{}, err
	}
	if cookie && r.Method != http.MethodGet && r.Method != http.MethodHead && !sameOrigin(r) {
		return Account{}, backfill.Errorf(backfill.Forbidden, "a change by session cookie must come from this site's own pages: use a bearer token elsewhere")
	}
	i, err := a.Account(r.Context(), secret)
	return Account{i, addressOf(r)}, err
}

// addressOf is the client's address without its port.
func addressOf(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// secretOf is the token of a request; a header wins over a cookie.
func secretOf(r *http.Request) (secret string, cookie bool, err error) {
	if header := r.Header.Get("Authorization"); header != "" {
		scheme, token, _ := strings.Cut(header, " ")
		if token = strings.TrimSpace(token); !strings.EqualFold(scheme, "Bearer") || token == "" {
			return "", false, backfill.Errorf(backfill.Unauthorized, "the Authorization header must be: Bearer TOKEN")
		}
		return token, false, nil
	}
	if c, err := r.Cookie(SessionCookie); err == nil && c.Value != "" {
		return c.Value, true, nil
	}
	return "", false, backfill.Errorf(backfill.Unauthorized, "a token is needed: send Authorization: Bearer TOKEN")
}

// sameOrigin trusts what browsers say of a request and pages cannot forge. Without
// either header it is no browser of today, and the answer is no.
func sameOrigin(r *http.Request) bool {
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" {
		return site == "same-origin"
	}
	origin, err := url.Parse(r.Header.Get("Origin"))
	return err == nil && origin.Host != "" && strings.EqualFold(origin.Host, r.Host)
}

const accountKey = "backfill.account"

// authenticate lets a request through that carries a valid token.
func (s *Server) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		account, err := s.auth.Authenticate(c.Request())
		if err != nil {
			return err
		}
		c.Set(accountKey, account)
		r := c.Request()
		c.SetRequest(r.WithContext(account.WithOrigin(r.Context())))
		return next(c)
	}
}

// WithOrigin is a context in which the audit says by what way and from where the
// account came.
func (a Account) WithOrigin(ctx context.Context) context.Context {
	return control.WithOrigin(ctx, control.Origin{Via: a.Via, Address: a.Address})
}

// place holds an account to the sites it has a role on.
func (s *Server) place(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		account, err := s.service.Place(c.Request().Context(), accountOf(c), c.Path(), c.Param)
		if err != nil {
			return err
		}
		c.Set(accountKey, account)
		return next(c)
	}
}

// siteFilter is the site that a list is asked for, which must be one of the account's.
func siteFilter(c echo.Context) (site string, only []string, err error) {
	a, site := accountOf(c), c.QueryParam("site")
	if site != "" {
		_, err = a.On(site)
	}
	return site, a.Only(), err
}

func accountOf(c echo.Context) Account {
	a, _ := c.Get(accountKey).(Account)
	return a
}
