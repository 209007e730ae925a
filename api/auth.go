package api

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// SessionCookie holds the id of the session of someone who signed in on the web pages. Whoever
// sets it makes it HttpOnly and SameSite=Strict.
const SessionCookie = "backfill_session"

// Auth tells whose token a request carries. Nothing is remembered from one request to
// the next: what is revoked is refused at once, by every process.
type Auth struct {
	accounts Accounts
	trust    Trust
}

// Accounts tells whose a token or a session is, or Unauthorized.
type Accounts interface {
	Account(ctx context.Context, secret string) (control.Identity, error)
	Session(ctx context.Context, id string) (control.Identity, error)
	User(ctx context.Context, name string) (control.Identity, error)
}

// Trust is what is believed of proxies.
type Trust struct {
	// From are the networks that proxies connect from: of them X-Forwarded-For is
	// believed. Default: none.
	From []netip.Prefix
	// Header is the one in which a proxy names who has signed in there. The proxy must
	// take it out of what clients send. Default "": none is believed.
	Header string
}

// proxy reports whether an address is that of a trusted proxy.
func (t Trust) proxy(address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && slices.ContainsFunc(t.From, func(p netip.Prefix) bool { return p.Contains(a.Unmap().WithZone("")) })
}

// address is the client's: the last in X-Forwarded-For that no trusted proxy has, if
// a trusted proxy sent it, else whoever has connected.
func (t Trust) address(r *http.Request) string {
	at, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		at = r.RemoteAddr
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for _, hop := range slices.Backward(hops) {
		if hop = strings.TrimSpace(hop); !t.proxy(at) || hop == "" {
			break
		}
		if _, err := netip.ParseAddr(hop); err != nil {
			break
		}
		at = hop
	}
	return at
}

// named is whom a trusted proxy names.
func (t Trust) named(r *http.Request) (name string, ok bool) {
	at, _, err := net.SplitHostPort(r.RemoteAddr)
	if t.Header == "" || err != nil || !t.proxy(at) {
		return "", false
	}
	// Two are none: one of them may be the client's own.
	if all := r.Header.Values(t.Header); len(all) == 1 && storable(all[0]) {
		return all[0], all[0] != ""
	}
	return "", false
}

// NewAuth looks accounts up, best in a control.Store.
func NewAuth(accounts Accounts) *Auth { return NewAuthBehind(accounts, Trust{}) }

// NewAuthBehind is NewAuth behind proxies that are believed.
func NewAuthBehind(accounts Accounts, trust Trust) *Auth {
	return &Auth{accounts, trust}
}

// Authenticate returns the account of a request's bearer token or session cookie,
// or Unauthorized. A cookie that comes along with a request another site's page
// may have made is Forbidden unless the request only reads.
func (a *Auth) Authenticate(r *http.Request) (Account, error) {
	secret, cookie, err := secretOf(r)
	// A browser sends what the proxy goes by along with what other sites' pages ask,
	// as it does a cookie.
	name, named := a.trust.named(r)
	if named = named && r.Header.Get("Authorization") == ""; named {
		cookie, err = true, nil
	}
	if err != nil {
		return Account{}, err
	}
	if cookie && r.Method != http.MethodGet && r.Method != http.MethodHead && !sameOrigin(r) {
		return Account{}, backfill.Errorf(backfill.Forbidden, "a change by session cookie must come from this site's own pages: use a bearer token elsewhere")
	}
	var i control.Identity
	switch {
	case named:
		i, err = a.accounts.User(r.Context(), name)
	case cookie:
		i, err = a.accounts.Session(r.Context(), secret)
	default:
		i, err = a.accounts.Account(r.Context(), secret)
	}
	return Account{i, a.Address(r), i.Role}, err
}

// Address is the client's address without its port.
func (a *Auth) Address(r *http.Request) string { return a.trust.address(r) }

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

// SignIn begins a session of whoever has a name and a password; it returns what the
// cookie holds.
func (s *Service) SignIn(ctx context.Context, name, password, address string, lasts time.Duration) (string, error) {
	if !storable(name) || len(name) > 100 || len(password) > maxHeader {
		return "", backfill.Errorf(backfill.Unauthorized, "the name or the password is wrong")
	}
	return s.Store.SignIn(ctx, name, password, address, lasts)
}

// FirstUser makes the first account with the link that the first start prints, and
// begins its session.
func (s *Service) FirstUser(ctx context.Context, link, name, password, address string, lasts time.Duration) (string, error) {
	ctx = control.WithOrigin(ctx, control.Origin{Via: "link", Address: address})
	if err := s.Store.FirstUser(ctx, link, name, password); err != nil {
		return "", err
	}
	return s.Store.SignIn(ctx, name, password, address, lasts)
}

// SignInAs begins a session of whom a sign-in provider vouches for.
func (s *Service) SignInAs(ctx context.Context, who control.Person, rights control.Rights, address string, lasts time.Duration) (string, error) {
	if !storable(who.Name + who.Issuer + who.Subject) {
		return "", backfill.Errorf(backfill.Unauthorized, "the provider names nobody")
	}
	ctx = control.WithOrigin(ctx, control.Origin{Via: "provider", Address: address})
	return s.Store.SignInAs(ctx, who, rights, address, lasts)
}

// SignInByToken begins a session of a token's account.
func (s *Service) SignInByToken(ctx context.Context, secret, address string, lasts time.Duration) (string, error) {
	return s.Store.SignInByToken(ctx, secret, address, lasts)
}

// EndSession ends a session.
func (s *Service) EndSession(ctx context.Context, id string) error {
	return s.Store.EndSession(ctx, id)
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
