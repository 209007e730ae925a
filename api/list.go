package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"net/http"
	"strconv"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
)

// cut drops what was read beyond limit only to learn that there is more.
func cut[T any](list []T, limit int) ([]T, bool) {
	if len(list) > limit {
		return list[:limit], true
	}
	return list, false
}

const defaultLimit = 100

// page is one page of a list.
type page[T any] struct {
	Data       []T     `json:"data"`
	NextCursor *string `json:"next_cursor"`
}

// limitOf is how many items a request wants; validate has held it to the bounds.
func limitOf(c echo.Context) int {
	if n, err := strconv.Atoi(c.QueryParam("limit")); err == nil {
		return n
	}
	return defaultLimit
}

// listPage answers with a page: items were read with one more than the limit, and
// at tells where an item stands.
func listPage[T, J any](c echo.Context, items []T, at func(T) int64, show func(T) J) error {
	items, more := cut(items, limitOf(c))
	out := page[J]{Data: make([]J, len(items))}
	for i, item := range items {
		out.Data[i] = show(item)
	}
	if more {
		next := cursor(c, at(items[len(items)-1]))
		out.NextCursor = &next
	}
	return c.JSON(http.StatusOK, out)
}

// listAll answers with a list that is never long.
func listAll[T, J any](c echo.Context, items []T, show func(T) J) error {
	out := page[J]{Data: make([]J, len(items))}
	for i, item := range items {
		out.Data[i] = show(item)
	}
	return c.JSON(http.StatusOK, out)
}

// cursor names a position in the list that a request asks for. It is opaque, and
// bound to the list and its filters: with others it would skip or repeat items.
func cursor(c echo.Context, position int64) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(position))
	return base64.RawURLEncoding.EncodeToString(append(b, mark(c, b)...))
}

// positionOf reads the request's cursor; none is position 0.
func positionOf(c echo.Context) (int64, error) {
	given := c.QueryParam("cursor")
	if given == "" {
		return 0, nil
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(given)
	if err != nil || len(b) < 8 || subtle.ConstantTimeCompare(b[8:], mark(c, b[:8])) == 0 {
		return 0, fieldError(backfill.Invalid, "cursor", "is not one of this list: begin without it, or keep the filters it came with")
	}
	return int64(binary.BigEndian.Uint64(b)), nil
}

func mark(c echo.Context, position []byte) []byte {
	filters := c.Request().URL.Query()
	filters.Del("cursor")
	filters.Del("limit")
	// Where a list begins is no filter: what comes after goes on without it.
	filters.Del("position")
	filters.Del("from_key")
	sum := sha256.Sum256(append(position[:8:8], c.Request().URL.EscapedPath()+"?"+filters.Encode()...))
	return sum[:8]
}

// idOf is a number in the path; validate has checked it.
func idOf(c echo.Context, name string) (int64, error) {
	n, err := strconv.ParseInt(c.Param(name), 10, 64)
	if err != nil {
		return 0, backfill.Errorf(backfill.NotFound, "no %s %.100q", name, c.Param(name))
	}
	return n, nil
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// orEmpty keeps a list that may be nil from becoming null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}
