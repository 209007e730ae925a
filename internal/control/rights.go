package control

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

// Role is what an account may do; each includes the ones before it.
type Role string

// The roles, smallest first.
const (
	Viewer    Role = "viewer"
	Requester Role = "requester"
	Reviewer  Role = "reviewer"
	Admin     Role = "admin"
)

var roleRank = map[Role]int{Viewer: 1, Requester: 2, Reviewer: 3, Admin: 4}

// Covers reports whether r may do what needs need.
func (r Role) Covers(need Role) bool { return roleRank[r] >= roleRank[need] }

// Rights are a role on every site, or a role for each of some sites. Groups of a sign-in
// provider may give both: then the higher of the two holds on a site.
type Rights struct {
	Role  Role            `json:"role,omitempty"`  // "": none but on Sites
	Sites map[string]Role `json:"sites,omitempty"` // nil: every site
}

// At is the role on a site, "" for none.
func (r Rights) At(site string) Role {
	if own := r.Sites[site]; own.Covers(r.Role) {
		return own
	}
	return r.Role
}

// Only are the sites by name that there are rights on, nil for every site.
func (r Rights) Only() []string {
	if r.Role != "" {
		return nil
	}
	return slices.AppendSeq([]string{}, maps.Keys(r.Sites))
}

// Equal reports whether two rights are the same.
func (r Rights) Equal(o Rights) bool {
	return r.Role == o.Role && (r.Sites == nil) == (o.Sites == nil) && maps.Equal(r.Sites, o.Sites)
}

func (r Rights) String() string {
	var parts []string
	if r.Role != "" {
		parts = append(parts, string(r.Role))
	}
	for _, site := range slices.Sorted(maps.Keys(r.Sites)) {
		parts = append(parts, fmt.Sprintf("%s on %s", r.Sites[site], site))
	}
	return strings.Join(parts, ", ")
}

// check refuses rights that make no sense, and sites that are not there.
func (r Rights) check(ctx context.Context, tx pgx.Tx) error {
	roles := slices.AppendSeq([]Role{}, maps.Values(r.Sites))
	if r.Sites == nil || r.Role != "" {
		roles = append(roles, r.Role)
	}
	for _, role := range roles {
		if roleRank[role] == 0 {
			return backfill.Errorf(backfill.Invalid, "role %q: use viewer, requester, reviewer or admin", role)
		}
	}
	if r.Sites == nil {
		return nil
	}
	if len(r.Sites) == 0 {
		return either
	}
	var unknown *string
	err := tx.QueryRow(ctx, `SELECT min(x) FROM unnest($1::text[]) x WHERE x NOT IN (SELECT name FROM backfill_control.site)`, slices.AppendSeq([]string{}, maps.Keys(r.Sites))).Scan(&unknown)
	if err == nil && unknown != nil {
		err = backfill.Errorf(backfill.NotFound, "no site %q: backfill site add makes one", *unknown)
	}
	return err
}

var either = backfill.Errorf(backfill.Invalid, "give a role on every site, or a role for each of some sites")

// given refuses both at once, which a person does not give.
func (r Rights) given() error {
	if r.Role != "" && r.Sites != nil {
		return either
	}
	return nil
}

// ParseRights makes rights of a role and of sites, each NAME or NAME=ROLE. Without
// sites the role is one on every site.
func ParseRights(role Role, sites []string) (Rights, error) {
	if len(sites) == 0 {
		return Rights{Role: role}, nil
	}
	out := Rights{Sites: map[string]Role{}}
	for _, given := range sites {
		site, own, found := strings.Cut(given, "=")
		if !found {
			own = string(role)
		}
		if roleRank[Role(own)] == 0 {
			return out, backfill.Errorf(backfill.Invalid, "site %q: the role %q is none of viewer, requester, reviewer, admin", given, own)
		}
		out.Sites[site] = Role(own)
	}
	return out, nil
}

// Identity is who a credential stands for, and what it may do.
type Identity struct {
	Name string
	Rights
	Via string // by what: token, session, header
}

// Ways by which somebody was known, as the audit has them.
const (
	ViaToken   = "token"
	ViaSession = "session"
	ViaHeader  = "header"
)

// Origin is by what way, and from what address, something was asked for.
type Origin struct {
	Via     string `json:"via,omitempty"`
	Address string `json:"address,omitempty"`
}

type originKey struct{}

// WithOrigin is a context in which what is recorded in the audit has that origin.
func WithOrigin(ctx context.Context, o Origin) context.Context {
	return context.WithValue(ctx, originKey{}, o)
}

// OriginOf is what WithOrigin has put there.
func OriginOf(ctx context.Context) Origin {
	o, _ := ctx.Value(originKey{}).(Origin)
	return o
}
