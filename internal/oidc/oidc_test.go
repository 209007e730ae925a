package oidc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

func TestGrants(t *testing.T) {
	for text, want := range map[string]Grant{
		"staff=viewer":               {"staff", control.Viewer, ""},
		"cn=dba,dc=example=admin":    {"cn=dba,dc=example", control.Admin, ""},
		"maple-leads=reviewer@maple": {"maple-leads", control.Reviewer, "maple"},
	} {
		var g Grant
		require.NoError(t, g.UnmarshalText([]byte(text)))
		require.Equal(t, want, g)
	}
	for _, text := range []string{"", "staff", "=viewer", "staff=", "staff=owner", "staff=viewer@"} {
		require.Error(t, new(Grant).UnmarshalText([]byte(text)), text)
	}
}

func TestRights(t *testing.T) {
	p := New(Config{Grants: []Grant{{"staff", control.Viewer, ""}, {"dba", control.Admin, ""}, {"leads", control.Reviewer, "maple"}, {"all", control.Viewer, "maple"}, {"all", control.Viewer, "oak"}}})
	for _, c := range []struct {
		claim any
		want  control.Rights
	}{
		{nil, control.Rights{}},
		{7, control.Rights{}},
		{"staff", control.Rights{Role: control.Viewer}},
		{[]any{"dba", "staff", 7}, control.Rights{Role: control.Admin}},
		{[]any{"all", "leads"}, control.Rights{Sites: map[string]control.Role{"maple": control.Reviewer, "oak": control.Viewer}}},
		{[]any{"leads", "staff"}, control.Rights{Role: control.Viewer, Sites: map[string]control.Role{"maple": control.Reviewer}}},
		{[]any{"all", "staff"}, control.Rights{Role: control.Viewer}},
		{[]any{"staff,dba"}, control.Rights{}},
	} {
		require.Equal(t, c.want, p.rights(texts(c.claim)), "%v", c.claim)
	}
}
