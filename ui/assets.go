package ui

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"

	"github.com/labstack/echo/v4"
)

//go:embed static templates
var files embed.FS

// assets are the files pages refer to, under an address that changes with their
// contents: browsers keep them for ever and never mix two versions, and a script
// finds the others beside itself.
type assets struct {
	prefix string
	byName map[string][]byte
}

func loadAssets() *assets {
	a := &assets{byName: map[string][]byte{}}
	hash := sha256.New()
	names, err := fs.Glob(files, "static/*")
	if err != nil {
		panic(err) // the pattern is constant
	}
	for _, name := range names { // in order of their names
		b, err := files.ReadFile(name)
		if err != nil {
			panic(err) // embedded
		}
		a.byName[path.Base(name)] = b
		hash.Write([]byte(name))
		hash.Write(b)
	}
	a.prefix = "/assets/" + hex.EncodeToString(hash.Sum(nil))[:12] + "/"
	return a
}

func (a *assets) url(name string) string {
	if a.byName[name] == nil {
		panic("no asset " + name) // a template names a file that is not there
	}
	return a.prefix + name
}

var contentTypes = map[string]string{".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

func (a *assets) serve(c echo.Context) error {
	name := c.Param("name")
	b, ok := a.byName[name]
	if !ok {
		return echo.NewHTTPError(http.StatusNotFound)
	}
	h := c.Response().Header()
	h.Set("Cache-Control", "public, max-age=31536000, immutable")
	h.Set("X-Content-Type-Options", "nosniff")
	// An SVG opened by itself is a document of its own.
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; sandbox")
	return c.Blob(http.StatusOK, contentTypes[strings.ToLower(path.Ext(name))], b)
}
