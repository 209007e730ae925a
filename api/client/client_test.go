package client

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is generated is what the document says now.
func TestGeneratedCodeIsFresh(t *testing.T) {
	if testing.Short() {
		t.Skip("building the generator takes a minute the first time")
	}
	source, err := os.ReadFile("client.go")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(source), "\n//go:generate go ")
	require.True(t, found)
	line, _, _ := strings.Cut(rest, "\n")
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(filepath.Join(dir, "client"), os.DirFS(".")))
	document, err := os.ReadFile("../openapi.yaml")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "openapi.yaml"), document, 0o600))
	fresh := filepath.Join(dir, "client", "client.gen.go")
	require.NoError(t, os.Remove(fresh))
	cmd := exec.CommandContext(t.Context(), "go", strings.Fields(line)...)
	cmd.Dir = filepath.Join(dir, "client")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	want, err := os.ReadFile(fresh)
	require.NoError(t, err)
	got, err := os.ReadFile("client.gen.go")
	require.NoError(t, err)
	if string(want) != string(got) {
		t.Fatal("client.gen.go is not what openapi.yaml gives: run make generate")
	}
}

// A row keeps the order of its columns, and NULL is no text.
func TestColumns(t *testing.T) {
	const text = `{"zeta":"1","alpha":null,"m\"":"é"}`
	var c Columns
	require.NoError(t, json.Unmarshal([]byte(text), &c))
	require.Equal(t, []string{"zeta", "alpha", "m\""}, []string{c[0].Name, c[1].Name, c[2].Name})
	require.Nil(t, c.Get("alpha"))
	require.Equal(t, "1", *c.Get("zeta"))
	out, err := json.Marshal(c)
	require.NoError(t, err)
	require.Equal(t, text, string(out))
	require.Nil(t, c.Get("missing"))
	require.Error(t, json.Unmarshal([]byte(`[1]`), &c))
	require.Error(t, json.Unmarshal([]byte(`{"a":{}}`), &c))
	var none Columns
	require.NoError(t, json.Unmarshal([]byte(`null`), &none))
	require.Nil(t, none)
}

func TestAddress(t *testing.T) {
	require.Equal(t, "/sites/a%2Fb/tables/public.%7Bx%7D/life", address("/sites/{site}/tables/{table}/life", "a/b", "public.{x}"))
	require.Equal(t, "/sites", address("/sites"))
}

func TestQuery(t *testing.T) {
	require.Empty(t, queryOf(nil))
	require.Empty(t, queryOf((*ListRowsParams)(nil)))
	require.Empty(t, queryOf(&ListRowsParams{}))
	limit := Limit(5)
	require.Equal(t, "key=a&key=b&limit=5", queryOf(&ListRowsParams{Key: []string{"a", "b"}, Limit: &limit}).Encode())
	require.Equal(t, "from=school", queryOf(&GetShadowParams{From: "school"}).Encode())
}

func TestReadEvents(t *testing.T) {
	const text = ": hello\n\nid: 1\nevent: backfill\ndata: a\ndata:  b\n\ndata\n\nretry: 10\n\nid: 2\r\ndata: c\r\n\r\ndata: unfinished"
	var got []event
	lines := 0
	require.NoError(t, readEvents(strings.NewReader(text), func() { lines++ }, func(e event) bool {
		got = append(got, e)
		return true
	}))
	require.Equal(t, []event{{"1", "backfill", "a\n b"}, {"1", "", ""}, {"2", "", "c"}}, got)
	require.Equal(t, 15, lines)

	require.NoError(t, readEvents(strings.NewReader(text), func() {}, func(event) bool { return false }))
	require.Error(t, readEvents(strings.NewReader(strings.Repeat("x", maxEvent+1)), func() {}, func(event) bool { return true }))
}
