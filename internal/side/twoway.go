package side

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/copypipe"
	"backfill/internal/row"
)

// What makes a table captured on both sides safe, tried in the model of
// internal/twoway: an incoming change is in conflict with a change of its key made
// here that is not pushed yet, or was pushed under a number above the incoming one's
// stamp, which says how much of this side the other had seen when it read the row.

// sameKey compares two keys, text[] expressions, by their types' own equality.
func sameKey(l *row.Layout, a, b string) string {
	x, y := l.KeyFrom(a), l.KeyFrom(b)
	var same []string
	for n, c := range l.KeyColumns() {
		same = append(same, x[n]+" "+c.Equals()+" "+y[n])
	}
	return strings.Join(same, " AND ")
}

// seen is the SQL of the number up to which all of the other side's changes of
// two-way tables have been seen here.
func (db *DB) seen() string {
	s := strings.NewReplacer("{schema}", db.schema)
	return s.Replace(`(SELECT least(a.seq, (SELECT min(coalesce(h.unseen, h.seq)) - 1 FROM {schema}.held h
		WHERE h.table_id IN (SELECT table_id FROM {schema}.two_way))) FROM {schema}.applied a)`)
}

// stampOfRows is the SQL of a live row's stamp: this side's position, or what is
// below the first change of its key that is set aside, and so was not seen.
func (db *DB) stampOfRows(ctx context.Context, tx pgx.Tx, t *Table, tableID int32, key string) (string, error) {
	return db.stamp(ctx, tx, t, tableID, key, `
		SELECT `+t.Layout.KeyText("t")+` AS key, min(h.first) AS first FROM h JOIN `+t.SQL+` t ON `+t.Layout.KeyEquals("t", "h.key")+` GROUP BY 1`)
}

// stampOfRecords is the same for a key among the outbox records up to a number.
func (db *DB) stampOfRecords(ctx context.Context, tx pgx.Tx, t OutboxTable, tableID int32, cut int64, key string) (string, error) {
	return db.stamp(ctx, tx, t.Table, tableID, key, `
		SELECT k.key, min(h.first) AS first FROM h JOIN (
		    SELECT DISTINCT key FROM `+db.captured(t.Name)+` o WHERE seq <= `+fmt.Sprint(cut)+`) k
		    ON `+sameKey(t.Layout, "k.key", "h.key")+` GROUP BY 1`)
}

func (db *DB) stamp(ctx context.Context, tx pgx.Tx, t *Table, tableID int32, key, unseen string) (string, error) {
	position := `(SELECT seq FROM ` + db.schema + `.applied)`
	seqs, err := db.readable(ctx, tx, t, tableID)
	if err != nil || len(seqs) == 0 {
		return position, db.orNotSetUp(err)
	}
	// Held rows can be many, and their keys have no statistics.
	if _, err := tx.Exec(ctx, `SET LOCAL enable_hashjoin = on`); err != nil {
		return "", err
	}
	var by string
	if err := tx.QueryRow(ctx, `
		WITH h AS MATERIALIZED (SELECT key, coalesce(unseen, seq) AS first FROM `+db.schema+`.held WHERE table_id = $1 AND seq = ANY ($2))
		SELECT coalesce(jsonb_object_agg(to_jsonb(u.key)::text, u.first), '{}')::text FROM (`+unseen+`) u`, tableID, seqs).Scan(&by); err != nil {
		return "", err
	}
	if _, err := tx.Exec(ctx, `SET LOCAL enable_hashjoin = off`); err != nil {
		return "", err
	}
	return `least(` + position + `, (` + row.Literal(by) + `::jsonb ->> to_jsonb(` + key + `)::text)::bigint - 1)`, nil
}

// readable lists the changes of a table set aside here whose keys can be read as the
// key's types; no row here has the key of another.
func (db *DB) readable(ctx context.Context, tx pgx.Tx, t *Table, tableID int32) (out []int64, err error) {
	rows, err := tx.Query(ctx, `SELECT DISTINCT seq FROM `+db.schema+`.held WHERE table_id = $1 AND op <> 't'`, tableID)
	if err != nil {
		return nil, err
	}
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, err
	}
	var halves func(seqs []int64) error
	halves = func(seqs []int64) error {
		if len(seqs) == 0 {
			return nil
		}
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT `+strings.Join(t.Layout.KeyFrom("h.key"), ", ")+` FROM `+db.schema+`.held h WHERE table_id = $1 AND seq = ANY ($2)`, tableID, seqs)
			return err
		})
		switch {
		case err == nil:
			out = append(out, seqs...)
			return nil
		case !refusesRows(err):
			return err
		case len(seqs) == 1:
			return nil
		}
		return errors.Join(halves(seqs[:len(seqs)/2]), halves(seqs[len(seqs)/2:]))
	}
	return out, halves(seqs)
}

// remember adds what own writes (table_id, key, seq, since) to the changes known as ours.
func (db *DB) remember(ctx context.Context, tx pgx.Tx, own func(io.Writer) error) error {
	if _, err := tx.Exec(ctx, `CREATE TEMP TABLE IF NOT EXISTS sent (table_id integer, key text[] COLLATE "C", seq bigint, since bigint) ON COMMIT DELETE ROWS`); err != nil {
		return err
	}
	if err := copypipe.Run(own, func(r io.Reader) error {
		_, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.sent (table_id, key, seq, since) FROM STDIN (FORMAT binary)`)
		return err
	}); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO `+db.schema+`.own AS o (table_id, key, seq, since) SELECT table_id, key, seq, since FROM pg_temp.sent
		ON CONFLICT (table_id, key, since) DO UPDATE SET seq = greatest(o.seq, excluded.seq)`)
	return err
}

// TwoWay tells since when the own changes of each two-way table are known here.
func (db *DB) TwoWay(ctx context.Context) (map[int32]int64, error) {
	since := map[int32]int64{}
	err := db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT table_id, since FROM `+db.schema+`.two_way`)
		if err != nil {
			return db.orNotSetUp(err)
		}
		var id int32
		var at int64
		_, err = pgx.ForEachRow(rows, []any{&id, &at}, func() error { since[id] = at; return nil })
		return err
	})
	return since, err
}

// BeginTwoWay makes known what was pushed of a table and not seen by the other side
// when it came to be captured on both.
func (db *DB) BeginTwoWay(ctx context.Context, tableID int32, since int64, own func(io.Writer) error) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `DELETE FROM `+db.schema+`.own WHERE table_id = $1 AND seq <= $2`, tableID, since); err != nil {
			return db.orNotSetUp(err)
		}
		if err := db.remember(ctx, tx, own); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `
			INSERT INTO `+db.schema+`.two_way (table_id, since) VALUES ($1, $2) ON CONFLICT (table_id) DO UPDATE SET since = excluded.since`, tableID, since)
		return err
	})
}

// ForgetOwn forgets own changes up to a number, once everything of the other side up
// to at is applied here, and reports whether any are left. Those stay that a change
// set aside here could still be in conflict with.
func (db *DB) ForgetOwn(ctx context.Context, upTo, at int64) (left bool, err error) {
	err = db.in(ctx, writing, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `
			DELETE FROM `+db.schema+`.own o
			 WHERE o.seq <= least($1, (SELECT min(coalesce(h.stamp, 0)) FROM `+db.schema+`.held h WHERE h.table_id IN (SELECT table_id FROM `+db.schema+`.two_way)))
			   AND (SELECT seq FROM `+db.schema+`.applied) >= $2`, upTo, at); err != nil {
			return db.orNotSetUp(err)
		}
		return tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+db.schema+`.own)`).Scan(&left)
	})
	return left, err
}

// errOvertaken says that the application wrote a row while changes were applied.
var errOvertaken = errors.New("the application wrote a row that was being applied")

// contested applies a segment that has rows of two-way tables. The application may
// commit a write of one of its keys after it was judged; the rows are locked once they
// are written, so a look at the outbox afterwards sees it, and all is judged again. That
// ends: whoever waited for one of the rows waits for the whole transaction from then on.
func (b *batch) contested(ctx context.Context, held bool) error {
	for range 20 {
		written, setAside, lost, refused := b.written, b.setAside, b.lost, maps.Clone(b.refused.now)
		err := pgx.BeginFunc(ctx, b.tx, func(pgx.Tx) error { return b.segmentOnce(ctx, held) })
		if !errors.Is(err, errOvertaken) {
			return err
		}
		b.written, b.setAside, b.lost, b.refused.now = written, setAside, lost, refused
	}
	return fmt.Errorf("apply on %s: %w, again and again", b.db.Side, errOvertaken)
}

// judge finds the conflicts among a table's incoming rows and decides them. What
// loses leaves incoming; what is for a person to decide is marked.
func (b *batch) judge(ctx context.Context, groups []group, n int) error {
	g := &groups[n]
	t := b.tables[g.tableID]
	err := b.orIsolateKeys(ctx, g, func(tx pgx.Tx) error { return b.hits(ctx, tx, g, &t, sameKey(g.target.Layout, "i.key", "m.key")) })
	if err != nil && refusesRows(err) {
		// An own key cannot be read as what the key's type is by now.
		err = pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error { return b.hits(ctx, tx, g, &t, "i.key = m.key") })
	}
	if err != nil {
		return err
	}
	for i := range groups {
		if groups[i].tableID == g.tableID {
			if err := b.before(ctx, &groups[i]); err != nil {
				return err
			}
		}
	}
	return b.decide(ctx, g)
}

// hits notes which rows are in conflict, and with what: i the incoming one wins, o the
// own, r it was released and gives way, q quarantine, d a person has decided for it.
func (b *batch) hits(ctx context.Context, tx pgx.Tx, g *group, t *backfill.Table, same string) error {
	if _, err := tx.Exec(ctx, `SET LOCAL enable_nestloop = off`); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `
		DELETE FROM pg_temp.judged WHERE id IN (SELECT id FROM pg_temp.incoming WHERE table_id = $1)`, g.tableID); err != nil {
		return err
	}
	if len(t.Policies) > 1 {
		if err := b.policies(ctx, tx, g, t, same); err != nil {
			return err
		}
	}
	if _, err := tx.Exec(ctx, `
		INSERT INTO pg_temp.judged (id, unsent, own, records, verdict)
		WITH m AS MATERIALIZED (
		    SELECT key, NULL::bigint AS seq, seq AS record FROM `+b.db.captured(g.target.Name)+` o
		    UNION ALL
		    SELECT key, seq, NULL FROM `+b.db.schema+`.own
		     WHERE table_id = $1 AND seq > (SELECT min(coalesce(stamp, 0)) FROM pg_temp.incoming WHERE table_id = $1)),
		h AS (
		    SELECT i.id, coalesce(i.since, `+since(t, "i.seq")+`) AS since, i.released, i.decided, bool_or(m.seq IS NULL) AS unsent, max(m.seq) AS own,
		           array_agg(m.record) FILTER (WHERE m.record IS NOT NULL) AS records
		      FROM pg_temp.incoming i JOIN m ON `+same+` AND (m.seq IS NULL OR m.seq > coalesce(i.stamp, 0))
		     WHERE i.table_id = $1 AND i.op IN ('c', 'u', 'd') GROUP BY 1, 2, 3, 4)
		SELECT id, unsent, own, coalesce(records, '{}'), CASE WHEN decided THEN 'd' WHEN released THEN 'r' ELSE `+b.policy(t)+` END FROM h`,
		g.tableID); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO pg_temp.judged (id, unsent, records, verdict)
		SELECT id, false, '{}', 'd' FROM pg_temp.incoming i WHERE table_id = $1 AND decided AND NOT EXISTS (SELECT FROM pg_temp.judged j WHERE j.id = i.id)`, g.tableID)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `SET LOCAL enable_nestloop = on`)
	return err
}

// since is the SQL of the policy that was in force when a change was pushed, by its
// number: the one since which it was, 0 for before the first.
func since(t *backfill.Table, seq string) string {
	sql := "CASE"
	for n := len(t.Policies) - 1; n >= 0; n-- {
		sql += fmt.Sprintf(" WHEN %s > %d THEN %d", seq, t.Policies[n].Since, t.Policies[n].Since)
	}
	return sql + " ELSE 0 END::bigint"
}

// policies finds by which policy each incoming change is judged, where those it may be
// in conflict with were pushed under several: the earliest of all that hang together
// by conflicts, through changes of either side. Each alone would be judged by another
// here than there, as not every pair is met on both sides: of changes of a key that
// come together only the newest counts. The first of either side are in conflict with
// each other, so both sides come to the same; what is found is kept with own changes.
func (b *batch) policies(ctx context.Context, tx pgx.Tx, g *group, t *backfill.Table, same string) error {
	s := strings.NewReplacer("{own}", b.db.schema+".own", "{held}", b.db.schema+".held", "{same}", same, "{seq}", "least(i.seq, i.unseen)", "{since}", since(t, "least(i.seq, i.unseen, h.first)"))
	var several bool
	if err := tx.QueryRow(ctx, s.Replace(`
		SELECT EXISTS (SELECT FROM {own} WHERE table_id = $1 AND since < $2) OR EXISTS (SELECT FROM pg_temp.incoming i WHERE table_id = $1 AND {seq} <= $2)
		    OR EXISTS (SELECT FROM {held} WHERE table_id = $1 AND coalesce(unseen, seq) <= $2)`), g.tableID, t.Policies[len(t.Policies)-1].Since).Scan(&several); err != nil || !several {
		return err
	}
	seqs, err := b.db.readable(ctx, tx, g.target, g.tableID)
	if err != nil {
		return err
	}
	// With what is set aside here of its key: it stands for that.
	if _, err := tx.Exec(ctx, s.Replace(`
		WITH m AS MATERIALIZED (SELECT key, seq, coalesce(unseen, seq) AS first FROM {held} WHERE table_id = $1 AND seq = ANY ($2))
		UPDATE pg_temp.incoming i SET since = {since}
		  FROM (SELECT i.id, min(m.first) AS first FROM pg_temp.incoming i LEFT JOIN m ON m.seq <= i.seq AND {same}
		         WHERE i.table_id = $1 AND i.op IN ('c', 'u', 'd') GROUP BY 1) h
		 WHERE i.id = h.id`), g.tableID, seqs); err != nil {
		return err
	}
	for {
		if _, err := tx.Exec(ctx, s.Replace(`
			UPDATE pg_temp.incoming i SET since = x.since
			  FROM (SELECT i.id, min(m.since) AS since FROM pg_temp.incoming i JOIN {own} m ON {same} AND m.seq > coalesce(i.stamp, 0)
			         WHERE i.table_id = $1 AND m.table_id = $1 AND NOT i.released GROUP BY 1) x
			 WHERE i.id = x.id AND x.since < i.since`), g.tableID); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, s.Replace(`
			INSERT INTO {own} AS o (table_id, key, seq, since)
			SELECT $1, key, max(seq), since FROM (
			    SELECT m.key, m.seq, min(i.since) AS since FROM pg_temp.incoming i JOIN {own} m ON {same} AND m.seq > coalesce(i.stamp, 0)
			     WHERE i.table_id = $1 AND m.table_id = $1 AND NOT i.released GROUP BY m.key, m.seq, m.since HAVING min(i.since) < m.since) x GROUP BY key, since
			ON CONFLICT (table_id, key, since) DO UPDATE SET seq = excluded.seq WHERE o.seq < excluded.seq`), g.tableID)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
	}
}

// policy is the SQL that decides a conflict by the policy that was in force since.
func (b *batch) policy(t *backfill.Table) string {
	verdict := func(winner string) string {
		switch winner {
		case backfill.Quarantine:
			return "'q'"
		case b.db.Side:
			return "'o'"
		}
		return "'i'"
	}
	sql, first := "CASE", ""
	for n := len(t.Policies) - 1; n >= 0; n-- {
		p := t.Policies[n]
		if p.Winner == "" {
			continue // captured on one side then: what was on its way is judged by what came next
		}
		first = verdict(p.Winner)
		sql += fmt.Sprintf(" WHEN since >= %d THEN %s", p.Since, first)
	}
	if first == "" {
		return "'i'"
	}
	return sql + " ELSE " + first + " END"
}

// before notes the row that is here now beside each conflict.
func (b *batch) before(ctx context.Context, g *group) error {
	here, err := asStaged(g.layout, g.target.Layout)
	if err != nil {
		return err
	}
	_, err = b.tx.Exec(ctx, byIndex+fmt.Sprintf(`
		UPDATE pg_temp.judged j SET there = x.there, was = x.was, same = x.same
		  FROM (SELECT i.id, t.tableoid IS NOT NULL AS there, CASE WHEN t.tableoid IS NOT NULL THEN %s END AS was,
		               CASE WHEN i.op = 'd' OR t.tableoid IS NULL THEN i.op = 'd' AND t.tableoid IS NULL ELSE %s COLLATE "C" = i."row" END AS same
		          FROM pg_temp.judged k JOIN pg_temp.incoming i ON i.id = k.id LEFT JOIN %s t ON %s
		         WHERE i.table_id = %d AND i.layout_id IS NOT DISTINCT FROM nullif(%d::bigint, 0)) x
		 WHERE j.id = x.id;
		SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on`,
		g.target.Layout.RowText("t"), here, g.target.SQL, g.target.Layout.KeyEquals("t", "i.key"), g.tableID, g.layoutID))
	return err
}

// decide takes the losers out of incoming, notes them, and marks what is for a person.
func (b *batch) decide(ctx context.Context, g *group) error {
	s := strings.NewReplacer("{schema}", b.db.schema)
	tag, err := b.tx.Exec(ctx, s.Replace(`
		WITH gone AS (
		    DELETE FROM pg_temp.incoming i USING pg_temp.judged j
		     WHERE j.id = i.id AND i.table_id = $1 AND j.verdict IN ('o', 'r') RETURNING i.seq, i.key, i.op, j.own, j.verdict, j.same),
		aside AS (
		    DELETE FROM {schema}.held h USING gone
		     WHERE h.table_id = $1 AND h.key = gone.key AND (h.seq = gone.seq OR h.seq < gone.seq AND gone.verdict = 'o'))
		INSERT INTO {schema}.lost (table_id, own, seq, to_seq, op, key) SELECT $1, false, seq, own, op, key FROM gone WHERE same IS NOT TRUE OR verdict = 'r'`), g.tableID)
	if err != nil {
		return err
	}
	if tag.RowsAffected() > 0 {
		b.lost, b.setAside = true, true
	}
	// Both sides have come to the same row: there is nothing to decide.
	_, err = b.tx.Exec(ctx, `
		UPDATE pg_temp.incoming i SET quarantine = true FROM pg_temp.judged j WHERE j.id = i.id AND i.table_id = $1 AND j.verdict = 'q' AND j.same IS NOT TRUE`, g.tableID)
	return err
}

// inherit lets incoming rows know the first of their key that was set aside and not
// applied since: they replace it, and if they are set aside too, it is still unseen.
// A released row that replaces a captured one stands for it.
func (b *batch) inherit(ctx context.Context, tx pgx.Tx, g *group) error {
	seqs, err := b.db.readable(ctx, tx, g.target, g.tableID)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		WITH h AS MATERIALIZED (SELECT key, seq, released, coalesce(unseen, seq) AS first FROM `+b.db.schema+`.held WHERE table_id = $1 AND seq = ANY ($2))
		UPDATE pg_temp.incoming i SET unseen = least(i.unseen, x.first), released = i.released AND x.released
		  FROM (SELECT i.id, min(h.first) AS first, bool_and(h.released) AS released FROM pg_temp.incoming i JOIN h ON h.seq <= i.seq AND `+sameKey(g.target.Layout, "i.key", "h.key")+`
		         WHERE i.table_id = $1 GROUP BY 1) x
		 WHERE i.id = x.id`, g.tableID, seqs)
	return err
}

// quarantined sets aside what is for a person to decide.
func (b *batch) quarantined(ctx context.Context) error {
	return b.aside(ctx, "quarantined", "in conflict with a change of "+b.db.Side+": retry takes this version for both sides, skip keeps that of "+b.db.Side, "i.quarantine")
}

// conclude looks whether the application has overtaken what was applied; if not, it
// notes the versions here that lost, takes back that they are to be pushed, and
// has what a person decided be pushed.
func (b *batch) conclude(ctx context.Context, groups []group) error {
	done := map[int32]bool{}
	for i := range groups {
		g := &groups[i]
		t := b.tables[g.tableID]
		if done[g.tableID] || !t.TwoWay() {
			continue
		}
		done[g.tableID] = true
		same := sameKey(g.target.Layout, "i.key", "m.key")
		err := pgx.BeginFunc(ctx, b.tx, func(tx pgx.Tx) error { return b.overtaken(ctx, tx, g, same) })
		if err != nil && refusesRows(err) {
			same = "i.key = m.key"
			err = b.overtaken(ctx, b.tx, g, same)
		}
		if err != nil {
			return err
		}
		layout, err := json.Marshal(g.target.Layout)
		if err != nil {
			return err
		}
		s := strings.NewReplacer("{schema}", b.db.schema, "{captured}", b.db.captured(g.target.Name), "{same}", same)
		tag, err := b.tx.Exec(ctx, s.Replace(`
			INSERT INTO {schema}.lost (table_id, own, seq, to_seq, op, key, layout, "row")
			SELECT $1, true, CASE WHEN NOT j.unsent THEN j.own END, i.seq, CASE WHEN j.there THEN 'u' ELSE 'd' END::"char", i.key, $2::text::jsonb, j.was
			  FROM pg_temp.judged j JOIN pg_temp.incoming i ON i.id = j.id WHERE i.table_id = $1 AND j.verdict IN ('i', 'd') AND j.same IS NOT TRUE`), g.tableID, string(layout))
		if err != nil {
			return err
		}
		b.lost = b.lost || tag.RowsAffected() > 0
		if _, err := b.tx.Exec(ctx, s.Replace(`
			WITH won AS (
			    SELECT j.verdict, j.records, i.key FROM pg_temp.judged j JOIN pg_temp.incoming i ON i.id = j.id WHERE i.table_id = $1 AND j.verdict IN ('i', 'd')),
			gone AS (DELETE FROM {schema}.outbox o USING won WHERE o.seq = ANY (won.records))
			INSERT INTO {schema}.outbox (tbl, op, key)
			SELECT $2, 'u', key FROM won WHERE verdict = 'd'
			UNION ALL -- what else stands in the same records
			SELECT $2, m.op, m.key FROM {captured} m
			 WHERE m.seq IN (SELECT unnest(records) FROM won) AND NOT EXISTS (SELECT FROM won i WHERE m.seq = ANY (i.records) AND {same})`), g.tableID, t.Name); err != nil {
			return err
		}
	}
	return nil
}

func (b *batch) overtaken(ctx context.Context, tx pgx.Tx, g *group, same string) error {
	var late bool
	if err := tx.QueryRow(ctx, `
		SELECT EXISTS (
		    SELECT FROM `+b.db.captured(g.target.Name)+` m JOIN pg_temp.incoming i ON `+same+`
		     WHERE i.table_id = $1
		       AND NOT EXISTS (SELECT FROM pg_temp.judged j WHERE j.id = i.id AND m.seq = ANY (j.records)))
		    OR EXISTS (
		    SELECT FROM `+b.db.schema+`.own m JOIN pg_temp.incoming i ON `+same+`
		     WHERE m.table_id = $1 AND i.table_id = $1 AND m.seq > coalesce(i.stamp, 0)
		       AND m.seq > coalesce((SELECT j.own FROM pg_temp.judged j WHERE j.id = i.id), 0))`, g.tableID).Scan(&late); err != nil {
		return err
	}
	if late {
		return errOvertaken
	}
	return nil
}

// LostRow is a version that lost a conflict here.
type LostRow struct {
	Note    string
	TableID int32
	Own     bool
	Seq     *int64
	ToSeq   *int64
	Op      string
	Key     backfill.Key
	Layout  *row.Layout
	Row     []*string
}

// Lost lists up to limit versions that lost a conflict and are not in history yet.
func (db *DB) Lost(ctx context.Context, limit int) (all []LostRow, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT note::text, table_id, own, seq, to_seq, op::text, key, layout, "row" FROM `+db.schema+`.lost ORDER BY note LIMIT $1`, limit)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[LostRow])
		return err
	})
	return all, db.orNotSetUp(err)
}

// ForgetLost forgets versions that are in history.
func (db *DB) ForgetLost(ctx context.Context, notes []string) error {
	return db.do(ctx, `DELETE FROM `+db.schema+`.lost WHERE note = ANY ($1::text[]::uuid[])`, notes)
}

// Snapshot is the present one; when it is returned, no crash of the server can give
// its transaction ids out again.
func (db *DB) Snapshot(ctx context.Context) (snapshot string, err error) {
	as := db.met.Load()
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := db.same(ctx, tx, as); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&snapshot); err != nil {
			return err
		}
		_, err := db.beat(ctx, as)
		return err
	})
	return snapshot, err
}
