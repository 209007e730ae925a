package api

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"backfill/internal/backfill"
)

// A key is refused as invalid, or has a text that can be stored for each column.
func FuzzParseKey(f *testing.F) {
	for _, types := range []string{"bigint", "smallint,text", "numeric", "uuid,date", "boolean", "timestamp with time zone,citext"} {
		for _, raw := range []string{`[1]`, `["x", 2]`, `{"c0":1,"c1":"x"}`, `[null]`, `[1e400]`, `["\u0000"]`, `[[1]]`, `{"c0":{}}`, `[true]`, "[\"\xff\"]", `[1] [2]`, ``, `[99999999999999999999]`, `["0x1f"]`, `{"c0":1,"c0":2}`} {
			f.Add(types, raw)
		}
	}
	f.Fuzz(func(t *testing.T, types, raw string) {
		p := &backfill.Panel{Table: backfill.Table{Name: "public.t"}}
		for i, typ := range strings.Split(types, ",") {
			p.Source.Key, p.Source.KeyTypes = append(p.Source.Key, "c"+string(rune('0'+i%10))), append(p.Source.KeyTypes, typ)
		}
		key, err := parseKey(p, []byte(raw))
		if err != nil {
			require.Equal(t, backfill.Invalid, backfill.CodeOf(err), "%v", err)
			require.True(t, utf8.ValidString(err.Error()), "%q", err.Error())
			return
		}
		require.Len(t, key, len(p.Source.Key))
		for i, text := range key {
			require.True(t, storable(text))
			require.True(t, fits(text, shortType(p.Source.KeyTypes[i])), "%q as %s", text, p.Source.KeyTypes[i])
		}
	})
}

// A cursor says where it stands in the list it is of, and in no other.
func FuzzCursor(f *testing.F) {
	f.Add("site=maple&limit=5", int64(1), "", "site=oak")
	f.Add("key=a&key=b", int64(-1), "AAAAAAAAAAE", "key=b&key=a")
	f.Add("", int64(1<<62), "AAAAAAAAAAAAAAAAAAAAAA", "table=public.t")
	f.Add("state=PENDING", int64(0), "_____________________w", "state=FAILED&limit=1")
	f.Fuzz(func(t *testing.T, query string, position int64, forged, other string) {
		at := func(query, cursor string) echo.Context {
			q, err := url.ParseQuery(query)
			if err != nil {
				t.Skip()
			}
			q.Del("cursor")
			if cursor != "" {
				q.Set("cursor", cursor)
			}
			r := httptest.NewRequest(http.MethodGet, "/api/v1/backfills", nil)
			r.URL.RawQuery = q.Encode()
			return echo.New().NewContext(r, httptest.NewRecorder())
		}
		c := cursor(at(query, ""), position)
		got, err := positionOf(at(query, c))
		require.NoError(t, err)
		require.Equal(t, position, got)
		filters := func(query string) string {
			q, _ := url.ParseQuery(query)
			q.Del("cursor")
			q.Del("limit")
			return q.Encode()
		}
		if filters(query) != filters(other) {
			_, err = positionOf(at(other, c))
			require.Equal(t, backfill.Invalid, backfill.CodeOf(err))
		}
		if forged != "" && forged != c {
			// Its mark is of 64 bits: nobody hits it by chance.
			_, err = positionOf(at(query, forged))
			require.Equal(t, backfill.Invalid, backfill.CodeOf(err), forged)
		}
	})
}

// Whatever is sent, the client is told what is wrong with it: validating and reading
// a request ends well, or in a problem that is the client's.
func FuzzRequest(f *testing.F) {
	s := New(Config{Service: &Service{Log: zap.NewNop()}, Log: zap.NewNop()})
	type kind struct{ method, path string }
	kinds := []kind{{"POST", "/sites/{site}/backfills"}, {"POST", "/backfills/{id}/approve"}, {"PUT", "/sites/{site}/tables/{table}"},
		{"POST", "/sites"}, {"GET", "/backfills"}, {"GET", "/backfills/{id}/rows"}, {"GET", "/sites/{site}/queue"}, {"GET", "/backfills/{id}/events"},
		{"POST", "/sites/{site}/queue/{seq}/retry"}}
	for i := range kinds {
		for _, body := range []string{``, `{}`, `null`, `[]`, `{"table":"public.t","from":"a","key":[1]}`, `{"revision":1e99}`, `{"revision":-1,"note":"\u0000"}`, `{"name":"x","sides":["a","b","c"]}`,
			"{\"note\":\"\xff\"}", `{"a":{"a":{"a":{"a":[[[[]]]]}}}}`, `{"note":"\ud800"}`} {
			f.Add(i, "maple", "7", "limit=5&state=PENDING&effect=insert&key=1&cursor=x", "application/json", "an-idempotency-key", "end-0123456789abcdef", body)
		}
	}
	f.Add(1, "%00", "99999999999999999999", "limit=-1", "text/plain", "né", "\x00", `{}`)
	f.Add(4, "a/b", "-1", "limit=1000000000&limit=0&state=%ff", "application/json; charset=x", strings.Repeat("k", 300), "", ``)
	f.Fuzz(func(t *testing.T, i int, name, id, query, media, idempotency, last, body string) {
		k := kinds[(i%len(kinds)+len(kinds))%len(kinds)]
		r := httptest.NewRequest(k.method, "/", strings.NewReader(body))
		r.URL.RawQuery = query
		r.Header = http.Header{"Content-Type": {media}, "Idempotency-Key": {idempotency}, "Last-Event-Id": {last}}
		c := s.echo.NewContext(r, httptest.NewRecorder())
		var names, values []string
		for _, m := range pathParameter.FindAllStringSubmatch(k.path, -1) {
			names, values = append(names, m[1]), append(values, map[string]string{"id": id, "seq": id}[m[1]])
			if values[len(values)-1] == "" {
				values[len(values)-1] = name
			}
		}
		c.SetParamNames(names...)
		c.SetParamValues(values...)
		err := s.validate(k.method, prefix+k.path)(func(c echo.Context) error {
			require.True(t, utf8.Valid(bodyOf(c)))
			for _, n := range c.ParamNames() {
				require.True(t, storable(c.Param(n)))
				if n == "id" || n == "seq" {
					if _, err := idOf(c, n); err != nil {
						return err
					}
				}
			}
			if _, err := positionOf(c); err != nil {
				return err
			}
			require.Positive(t, limitOf(c))
			require.LessOrEqual(t, limitOf(c), 1000)
			var in struct {
				Table, From, Mode, Note string
				Revision                int64
			}
			return decode(c, &in)
		})(c)
		if err != nil {
			p := ProblemOf(err)
			require.Less(t, p.Status, 500, "%v", err)
			require.NotEmpty(t, p.Detail)
		}
	})
}
