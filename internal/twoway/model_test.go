// Package twoway holds a model of tables captured on both sides: what may be in
// which order when both write the same keys, while pushes send rows as they are by
// then, backfills run in both directions, rows are held, and processes crash. It is
// where a rule is tried before the product follows it.
package twoway

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	schedules = flag.Int("schedules", 10_000, "how many random schedules the model tries")
	first     = flag.Uint64("first", 1, "the seed of the first")
)

// rules are what a schedule is run without; the zero value keeps them all.
type rules struct {
	unfenced         bool // a push that was held up after its commit deletes its records while the next one is under way
	judgesSent       bool // what was pushed and is about to be deleted counts as unsent when changes are judged
	forgetPushed     bool // own changes are forgotten when they were pushed
	forgetEarly      bool // own changes are forgotten without waiting for what is on its way
	forgetHeld       bool // own changes are forgotten although the other side has set one aside
	forgetWaiting    bool // own changes are forgotten although one they are in conflict with waits here
	lateStamp        bool // the stamp is read after the rows
	earlyStamp       bool // the stamp is read before the rows
	heldSeen         bool // a change set aside counts as seen by what is written afterwards
	newestUnseen     bool // so does one that was set aside and replaced by another set aside
	releasedWins     bool // released rows overwrite the receiver's own changes
	releaseUnchecked bool // a release does not look at the reverse direction
	releaseAlone     bool // releases of the two directions do not take turns
	sourceWins       bool // of two changes in conflict the incoming one wins
	receiverWins     bool // of two changes in conflict the own one wins
	noTouch          bool // a person's decision is not sent to the other side
	blindUpsert      bool // a change the application commits during an apply is not looked for
}

// policy decides conflicts: the number of the side that wins, or quarantine.
type policy int

const quarantine policy = 2

type entry struct {
	seq, key, version, stamp, snap int
	released, dropped              bool
}

type aside struct {
	entry
	unseen            int // the first of its key that was set aside, of which this is the newest
	conflict, decided bool
}

type record struct{ id, key int }

type side struct {
	clock  int // counts transactions: a snapshot is its value
	rows   map[int]int
	outbox []record
	own    map[int]int
	held   map[int]aside
	pos    int
	reach  int // published: nothing up to it is set aside or yet to come
	batch  int // the last push known to have been committed: an earlier one deletes nothing any more
	sent   int // the last push committed
}

type staged struct{ entry }

type push struct {
	step    int
	batch   int
	records []record
	entries []entry
	early   map[int]int
}

type request struct {
	rows  []staged
	floor int
	state int // 0 walks, 1 releases
	check int // releaseAlone: how much of the reverse queue was seen
}

type world struct {
	rng      *rand.Rand
	off      rules
	policy   policy
	keys     int
	calm     int     // of ten writes so many are not made
	refuses  int     // one in so many applied rows is refused at first
	finished [2]bool // a backfill from that side was released
	sides    [2]*side
	queue    [2][]entry // of the direction from that side
	seq      int
	ids      int
	pushes   [2]*push
	late     []func() // deletions of pushes that are on their way
	walks    [2]*request
	// versions: who wrote them over what, and which were noted as lost
	version  int
	replaced map[int]bool
	lost     map[int]bool
	log      []string
}

func newWorld(seed uint64, off rules) *world {
	w := &world{rng: rand.New(rand.NewPCG(seed, 1)), off: off, replaced: map[int]bool{}, lost: map[int]bool{}}
	w.policy, w.keys, w.refuses, w.calm = policy(w.rng.IntN(3)), 1+w.rng.IntN(2), 2+w.rng.IntN(6), w.rng.IntN(10)
	for i := range w.sides {
		w.sides[i] = &side{rows: map[int]int{}, own: map[int]int{}, held: map[int]aside{}}
	}
	for k := range w.keys {
		// What was there before is not tracked: it has no number above 0.
		w.sides[0].rows[k] = -1 - k
		if w.rng.IntN(2) == 0 {
			w.sides[1].rows[k] = -101 - k
		}
	}
	return w
}

func (w *world) say(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

// write is the application: it replaces the version it sees.
func (w *world) write(i int) {
	s, k := w.sides[i], w.rng.IntN(w.keys)
	w.version++
	w.replaced[s.rows[k]] = true
	s.rows[k] = w.version
	s.clock++
	w.touch(i, k)
	w.say("%d writes key %d: v%d", i, k, w.version)
}

func (w *world) touch(i, k int) {
	w.ids++
	w.sides[i].outbox = append(w.sides[i].outbox, record{w.ids, k})
}

// stamp is how much of the other side's changes of a key this side has seen.
func (w *world) stamp(i, k int) int {
	h, ok := w.sides[i].held[k]
	switch {
	case !ok || w.off.heldSeen:
		return w.sides[i].pos
	case w.off.newestUnseen:
		return h.seq - 1
	}
	return h.unseen - 1
}

// fence keeps pushes committed so far from deleting records later: what is still in
// the outbox is then pushed again.
func (w *world) fence(i int) {
	if !w.off.unfenced {
		w.sides[i].batch = w.sides[i].sent
	}
}

// pushing takes a push one step further: read, commit, delete. The direction's lock
// is held from the read to the commit.
func (w *world) pushing(i int) {
	s := w.sides[i]
	if w.pushes[i] == nil {
		w.pushes[i] = &push{early: map[int]int{}}
		for k := range w.keys {
			w.pushes[i].early[k] = w.stamp(i, k)
		}
		return
	}
	p := w.pushes[i]
	switch p.step++; p.step {
	case 1:
		w.fence(i)
		done := map[int]bool{}
		for _, r := range s.outbox {
			if w.rng.IntN(8) == 0 {
				break // a prefix
			}
			p.records = append(p.records, r)
			if !done[r.key] {
				done[r.key] = true
				e := entry{key: r.key, version: s.rows[r.key], stamp: w.stamp(i, r.key), snap: s.clock}
				if w.off.earlyStamp {
					e.stamp = p.early[r.key]
				}
				p.entries = append(p.entries, e)
			}
		}
		if len(p.records) == 0 {
			w.pushes[i] = nil
		}
	case 2:
		w.pushes[i] = nil
		s.sent++
		p.batch = s.sent
		for n, e := range p.entries {
			w.seq++
			e.seq = w.seq
			if w.off.lateStamp {
				e.stamp = w.stamp(i, e.key)
			}
			p.entries[n] = e
			w.queue[i] = append(w.queue[i], e)
			w.say("%d pushes %d: key %d v%d, stamp %d", i, e.seq, e.key, e.version, e.stamp)
		}
		w.late = append(w.late, func() {
			if s.batch >= p.batch && !w.off.unfenced {
				return
			}
			s.batch = max(s.batch, p.batch)
			gone := map[int]bool{}
			for _, r := range p.records {
				gone[r.id] = true
			}
			var left []record
			for _, r := range s.outbox {
				if !gone[r.id] {
					left = append(left, r)
				}
			}
			s.outbox = left
			for _, e := range p.entries {
				if !w.off.forgetPushed {
					s.own[e.key] = max(s.own[e.key], e.seq)
				}
			}
		})
	}
}

func (w *world) unsent(i, k int) bool {
	for _, r := range w.sides[i].outbox {
		if r.key == k {
			return true
		}
	}
	return false
}

func (w *world) clear(i, k int) {
	var left []record
	for _, r := range w.sides[i].outbox {
		if r.key != k {
			left = append(left, r)
		}
	}
	w.sides[i].outbox = left
}

// apply applies the next entries on a side, in one transaction.
func (w *world) apply(i, most int) bool {
	s := w.sides[i]
	if !w.off.judgesSent {
		w.fence(i)
	}
	n := 0
	for _, e := range w.queue[1-i] {
		if e.seq <= s.pos {
			continue
		}
		if n == most {
			break
		}
		n++
		if !e.dropped {
			w.receive(i, aside{entry: e}, w.rng.IntN(w.refuses) == 0)
		}
		s.pos = e.seq
	}
	s.clock++
	return n > 0
}

// receive judges an incoming change and applies it, drops it or sets it aside.
func (w *world) receive(i int, e aside, refused bool) {
	s := w.sides[i]
	conflict := w.unsent(i, e.key) || s.own[e.key] > e.stamp
	if w.off.blindUpsert && w.rng.IntN(20) == 0 {
		conflict = s.own[e.key] > e.stamp
	}
	winner := w.policy
	switch {
	case w.off.sourceWins:
		winner = policy(1 - i)
	case w.off.receiverWins:
		winner = policy(i)
	}
	e.unseen = e.seq
	older, replaces := s.held[e.key]
	replaces = replaces && older.seq <= e.seq
	if replaces {
		e.unseen = older.unseen
	}
	switch {
	case e.decided, !conflict:
	case e.released && !w.off.releasedWins:
		w.say("%d: released %d gives way", i, e.seq)
		if replaces && older.seq == e.seq {
			delete(s.held, e.key)
		}
		return
	case e.released, winner == policy(1-i):
	case winner == policy(i):
		w.say("%d: %d (v%d) loses", i, e.seq, e.version)
		w.lost[e.version] = true
		if replaces { // it is older and loses with it
			w.lost[older.version] = true
			delete(s.held, e.key)
		}
		return
	case winner == quarantine:
		w.say("%d: %d (v%d) is quarantined", i, e.seq, e.version)
		e.conflict = true
		s.held[e.key] = e
		return
	}
	if refused {
		// Of captured and released rows of a key the captured one's standing stays.
		e.released = e.released && (!replaces || older.released)
		w.say("%d: %d (v%d) is held", i, e.seq, e.version)
		s.held[e.key] = e
		return
	}
	delete(s.held, e.key)
	w.say("%d: %d applies key %d v%d", i, e.seq, e.key, e.version)
	if conflict && !e.released {
		if s.rows[e.key] != e.version {
			w.lost[s.rows[e.key]] = true
		}
		w.clear(i, e.key)
	}
	s.rows[e.key] = e.version
	if e.decided && !w.off.noTouch {
		w.touch(i, e.key)
	}
}

// retry tries what is set aside again; conflicts only when a person has decided.
func (w *world) retry(i int, refused bool) {
	s := w.sides[i]
	if !w.off.judgesSent {
		w.fence(i)
	}
	for k := range w.keys {
		if h, ok := s.held[k]; ok && (!h.conflict || h.decided) {
			w.receive(i, h, refused && w.rng.IntN(2) == 0)
		}
	}
	s.clock++
}

// decide is a person who looks at a conflict.
func (w *world) decide(i int) {
	s := w.sides[i]
	for k := range w.keys {
		h, ok := s.held[k]
		if !ok || !h.conflict || h.decided {
			continue
		}
		if w.rng.IntN(2) == 0 {
			h.decided = true
			s.held[k] = h
			w.say("%d: retry of %d", i, h.seq)
			continue
		}
		w.say("%d: skip of %d", i, h.seq)
		delete(s.held, k)
		w.lost[h.version] = true
		if !w.off.noTouch {
			w.touch(i, k)
		}
	}
}

// tell publishes how far a side has seen the other's changes.
func (w *world) tell(i int) {
	s := w.sides[i]
	reach := s.pos
	if !w.off.forgetHeld {
		for _, h := range s.held {
			reach = min(reach, h.unseen-1)
		}
	}
	s.reach = max(s.reach, reach)
}

// settle forgets own changes that nothing on its way can still be in conflict with.
// It looks under the lock of the incoming direction.
func (w *world) settle(i int) {
	s, o := w.sides[i], w.sides[1-i]
	if w.pushes[1-i] != nil && !w.off.forgetEarly {
		return // the lock is taken
	}
	upTo := o.reach
	if r := w.walks[1-i]; r != nil {
		upTo = min(upTo, r.floor)
	}
	if q := w.queue[1-i]; len(q) > 0 && q[len(q)-1].seq > s.pos && !w.off.forgetEarly {
		return
	}
	for _, h := range s.held {
		if !w.off.forgetWaiting {
			upTo = min(upTo, h.stamp)
		}
	}
	for k, q := range s.own {
		if q <= upTo {
			delete(s.own, k)
		}
	}
}

// backfill takes a walk or release one step further.
func (w *world) backfill(i int) {
	s, r := w.sides[i], w.walks[i]
	if r == nil {
		floor := s.pos
		for _, h := range s.held {
			floor = min(floor, h.unseen-1)
		}
		w.walks[i] = &request{floor: floor}
		return
	}
	if r.state == 0 {
		k := len(r.rows)
		if k < w.keys {
			r.rows = append(r.rows, staged{entry: entry{key: k, version: s.rows[k], stamp: w.stamp(i, k), snap: s.clock}})
			return
		}
		// Nothing captured before the last page may be left in the outbox.
		if len(s.outbox) == 0 && w.pushes[i] == nil {
			r.state = 1
		}
		return
	}
	if w.pushes[i] != nil || w.pushes[1-i] != nil && !w.off.releaseAlone {
		return
	}
	if r.state == 1 {
		r.check = len(w.queue[1-i])
		r.state = 2
		if w.off.releaseAlone {
			return // the other direction may get ahead between the look and the commit
		}
	}
	for _, row := range r.rows {
		overtaken := row.version == 0
		for _, e := range w.queue[i] {
			overtaken = overtaken || e.key == row.key && e.snap > row.snap
		}
		if !w.off.releaseUnchecked {
			for _, e := range w.queue[1-i][:r.check] {
				overtaken = overtaken || e.key == row.key && e.seq > row.stamp
			}
		}
		if overtaken {
			continue
		}
		w.seq++
		e := row.entry
		e.seq, e.released = w.seq, true
		w.queue[i] = append(w.queue[i], e)
		w.say("%d releases %d: key %d v%d, stamp %d", i, e.seq, e.key, e.version, e.stamp)
	}
	w.walks[i], w.finished[i] = nil, true
}

func (w *world) step() {
	i := w.rng.IntN(2)
	switch w.rng.IntN(20) {
	case 0, 1, 2:
		if w.rng.IntN(10) >= w.calm {
			w.write(i)
		}
	case 3, 4, 5, 6, 7:
		w.pushing(i)
	case 8, 9, 10:
		w.apply(i, 1+w.rng.IntN(3))
	case 11:
		w.retry(i, true)
	case 12, 13:
		w.tell(i)
	case 14:
		w.settle(i)
	case 15, 16:
		w.backfill(i)
	case 17:
		if len(w.late) > 0 {
			n := w.rng.IntN(len(w.late))
			w.late[n]()
			w.late = append(w.late[:n], w.late[n+1:]...)
		}
	case 18:
		switch w.rng.IntN(4) { // crashes
		case 0:
			w.pushes[i] = nil
		case 1:
			w.late = nil // pushed and not deleted: they are pushed again
		case 2:
			w.decide(i)
		}
	case 19:
		if w.rng.IntN(3) == 0 {
			w.decide(i)
		}
	}
}

// rest lets everything end, people included, and reports what is wrong.
func (w *world) rest() (wrong []string) {
	w.say("rest")
	quiet := func() bool {
		for range 200 {
			moved := len(w.late) > 0
			for _, fn := range w.late {
				fn()
			}
			w.late = nil
			for i := range w.sides {
				for w.pushes[i] != nil {
					w.pushing(i)
				}
				for len(w.sides[i].outbox) > 0 {
					moved = true
					w.pushing(i)
					for w.pushes[i] != nil {
						w.pushing(i)
					}
					for _, fn := range w.late {
						fn()
					}
					w.late = nil
				}
				for w.apply(i, 3) {
					moved = true
				}
				for range w.keys {
					w.retry(i, false)
				}
				w.tell(i)
				w.settle(i)
			}
			if !moved && len(w.sides[0].outbox)+len(w.sides[1].outbox) == 0 {
				return true
			}
		}
		return false
	}
	run := func() bool {
		for range 50 {
			if !quiet() {
				return false
			}
			if len(w.sides[0].held)+len(w.sides[1].held) == 0 {
				return true
			}
			// One person, one side at a time.
			w.decide(w.rng.IntN(2))
		}
		return false
	}
	if !run() {
		return []string{"it does not come to rest"}
	}
	// What was written or released is equal already; a backfill would hide that it is not.
	for k := range w.keys {
		if a, b := w.sides[0].rows[k], w.sides[1].rows[k]; a != b && (max(a, b) > 0 || w.finished[0] && a != 0 || w.finished[1] && b != 0) {
			return []string{fmt.Sprintf("key %d: v%d and v%d before the last backfill", k, a, b)}
		}
	}
	for i := range w.sides { // the backfills that are open, and one of everything
		for w.walks[i] != nil {
			w.backfill(i)
		}
		if !run() {
			return []string{"it does not come to rest"}
		}
	}
	for w.backfill(0); w.walks[0] != nil; {
		w.backfill(0)
	}
	if !run() {
		return []string{"it does not come to rest"}
	}
	final := map[int]bool{}
	for k := range w.keys {
		a, b := w.sides[0].rows[k], w.sides[1].rows[k]
		if a != b && !(a == 0 && b < 0) { // a backfill never deletes
			wrong = append(wrong, fmt.Sprintf("key %d: v%d and v%d", k, a, b))
		}
		final[a], final[b] = true, true
	}
	for v := 1; v <= w.version; v++ {
		if !final[v] && !w.replaced[v] && !w.lost[v] {
			wrong = append(wrong, fmt.Sprintf("v%d was lost silently", v))
		}
	}
	for i, s := range w.sides {
		w.tell(1 - i)
		w.settle(i)
		if len(s.own) > 0 {
			wrong = append(wrong, fmt.Sprintf("own changes of %d are never forgotten: %v", i, s.own))
		}
	}
	return wrong
}

func try(seed uint64, off rules) (wrong []string, w *world) {
	w = newWorld(seed, off)
	for range 20 + w.rng.IntN(120) {
		w.step()
	}
	return w.rest(), w
}

// With every rule kept no schedule ends with sides that differ, with a version lost
// without a note, or without end.
func TestModelConverges(t *testing.T) {
	from, n := *first, 0
	for ; n < *schedules; n++ {
		if wrong, w := try(from+uint64(n), rules{}); len(wrong) > 0 {
			for _, line := range w.log {
				t.Log(line)
			}
			t.Fatalf("seed %d, policy %d: %v; run it again with -first %d -schedules 1", from+uint64(n), w.policy, wrong, from+uint64(n))
		}
	}
	t.Logf("%d schedules from seed %d", n, from)
}

// near is where to look for a schedule that goes wrong without a rule, where such are
// rare. Another step in the model moves them.
var near = map[string]uint64{
	"own changes are forgotten too early":            3900,
	"releases of both directions do not take turns":  5200,
	"own changes are forgotten while set aside":      21500,
	"what is sent already wins as unsent":            25800,
	"own changes are forgotten while others wait":    361700,
	"what was set aside and replaced counts as seen": 36800,
}

// Without any one of the rules some schedule goes wrong.
func TestModelNeedsEachRule(t *testing.T) {
	for name, off := range map[string]rules{
		"a push that was held up deletes its records late": {unfenced: true},
		"what is sent already wins as unsent":              {judgesSent: true},
		"own changes are forgotten when pushed":            {forgetPushed: true},
		"own changes are forgotten too early":              {forgetEarly: true},
		"own changes are forgotten while set aside":        {forgetHeld: true},
		"own changes are forgotten while others wait":      {forgetWaiting: true},
		"the stamp is read after the rows":                 {lateStamp: true},
		"the stamp is read before the rows":                {earlyStamp: true},
		"what is set aside counts as seen":                 {heldSeen: true},
		"what was set aside and replaced counts as seen":   {newestUnseen: true},
		"released rows win":                                {releasedWins: true},
		"the incoming change wins":                         {sourceWins: true},
		"the own change wins":                              {receiverWins: true},
		"a person's decision stays on one side":            {noTouch: true},
		"what commits during an apply is overlooked":       {blindUpsert: true},
		"releases of both directions do not take turns":    {releaseAlone: true},
		"a release does not look at the other way":         {releaseUnchecked: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := max(near[name], 1); seed < near[name]+5000; seed++ {
				if wrong, _ := try(seed, off); len(wrong) > 0 {
					t.Logf("%s: seed %d: %v", name, seed, wrong)
					return
				}
			}
			require.Fail(t, "no schedule goes wrong: the rule is not needed, or the model does not try it")
		})
	}
}
