/*
 * Connect-time load balancing: local sockets that dial a frontend are sent to one of its endpoints before the first
 * packet exists. Whatever is not found here, or is in doubt, is left as it is: the rules of the base mode decide.
 *
 * Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d, so that IPv4-mapped sockets and plain ones share every map: the
 * datagram of a mapped socket passes sendmsg4, its reply recvmsg6. Ports are big-endian, as in the socket address.
 * Keys and values have explicit padding: the kernel compares keys as bytes.
 *
 * A loader without CAP_PERFMON gets the stricter verifier. It refuses an offset that was computed from an index, so
 * the flows of a socket are written out one by one.
 */

#define __always_inline inline __attribute__((always_inline))

#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define AF_INET 2
#define AF_INET6 10
#define V4_MAPPED 0xffff0000u

/* A helper that bcc 0.26 has no name for (linux/bpf.h). */
#define netns_cookie(ctx) (((u64 (*)(void *))122)(ctx))

#define KIND_ADDRESS 0
#define KIND_NODE_PORT_V4 4
#define KIND_NODE_PORT_V6 6

struct frontend { u32 address[4]; u16 port; u8 protocol; u8 kind; };
struct service { u32 id; u32 endpoints; u32 affinity_seconds; u32 flags; };
struct slot { u32 service; u32 index; };
struct endpoint { u32 address[4]; u16 port; u16 is_local; u32 service; };
struct address { u32 word[4]; };
struct client { u64 netns; u32 service; u32 padding; };
struct pin { u64 seen; u32 endpoint; u32 padding; };
/* As in linux/in.h and linux/in6.h. */
struct sockaddr { u16 sa_family; char sa_data[14]; };
struct in_addr { u32 s_addr; };
struct sockaddr_in { u16 sin_family; u16 sin_port; struct in_addr sin_addr; u8 padding[8]; };
struct in6_addr { u32 word[4]; };
struct sockaddr_in6 { u16 sin6_family; u16 sin6_port; u32 sin6_flowinfo; struct in6_addr sin6_addr; u32 sin6_scope_id; };
struct settings { u64 node_netns; u32 flags; u32 padding; };
/* The endpoint's address is kept too: its entry may be gone when a late reply comes. */
struct flow { struct frontend frontend; u32 endpoint; u32 address[4]; u16 port; u16 padding; };
struct flows { struct flow flow[4]; u32 next; u32 padding; };

struct connection { u32 address[4]; u16 port; u16 padding; u32 endpoint; };

#define ONLY_NODE_CLIENTS 1
#define KEEP_PEER 2
#define CONNECTED_UDP 4
#define IGNORE_MASQUERADE 8

/* Of a service: some of its endpoints are on this node, and may be the client itself. */
#define HAS_LOCAL_ENDPOINTS 1
/* Of a frontend: the rules masquerade what pods send there. */
#define MASQUERADES_PODS 2

#define NO_PREALLOC 1

BPF_F_TABLE("hash", struct frontend, struct service, frontends, 262144, NO_PREALLOC);
BPF_F_TABLE("hash", struct slot, u32, slots, 2097152, NO_PREALLOC);
BPF_F_TABLE("hash", u32, struct endpoint, endpoints, 2097152, NO_PREALLOC);
BPF_F_TABLE("hash", struct address, u32, node_addresses, 4096, NO_PREALLOC);
BPF_TABLE("lru_hash", struct client, struct pin, pins, 65536);
/*
 * Clients that are endpoints of the Service they dial. The rules serve them, hairpin included: they masquerade it,
 * and if only these choices were left to them, the client itself would be chosen too rarely.
 */
BPF_TABLE("lru_hash", struct client, u32, hairpins, 16384);
/* Connected UDP sockets by cookie: they are destroyed when their endpoint is removed. */
BPF_TABLE("lru_hash", u64, struct connection, connected, 16384);
BPF_ARRAY(settings, struct settings, 1);
/* Sockets that send datagrams to several destinations, and connected sockets. */
BPF_SK_STORAGE(kept, struct flows);
BPF_SK_STORAGE(peer, struct flow);

static __always_inline bool same_address(const u32 *a, const u32 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

static __always_inline bool same_frontend(const struct frontend *a, const struct frontend *b)
{
	return same_address(a->address, b->address) && a->port == b->port && a->protocol == b->protocol;
}

static __always_inline bool is_v4(const u32 *a)
{
	return a[0] == 0 && a[1] == 0 && a[2] == V4_MAPPED;
}

/* Return the service of a frontend: by its address, or by its port where the address serves node ports. */
static __always_inline struct service *find(struct bpf_sock_addr *ctx, struct frontend *f, struct settings *s)
{
	struct service *found = frontends.lookup(f);
	if (found)
		return found;
	struct address a = { { f->address[0], f->address[1], f->address[2], f->address[3] } };
	u32 *only_node = node_addresses.lookup(&a);
	if (!only_node)
		return 0;
	/* Every pod has a loopback address of its own. */
	if (*only_node && netns_cookie(ctx) != s->node_netns)
		return 0;
	struct frontend n = { .port = f->port, .protocol = f->protocol,
			      .kind = is_v4(f->address) ? KIND_NODE_PORT_V4 : KIND_NODE_PORT_V6 };
	return frontends.lookup(&n);
}

/*
 * Return whether the endpoint's address belongs to the caller's own namespace: the socket can be bound to it. The port
 * stays open; a client that is its own endpoint has this address as its source anyway.
 */
static __always_inline bool is_own4(struct bpf_sock_addr *ctx, struct endpoint *e)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr = { e->address[3] } };
	return !bpf_bind(ctx, (struct sockaddr *)&a, sizeof(a));
}

static __always_inline bool is_own6(struct bpf_sock_addr *ctx, struct endpoint *e)
{
	struct sockaddr_in6 a = { .sin6_family = AF_INET6,
				  .sin6_addr = { { e->address[0], e->address[1], e->address[2], e->address[3] } } };
	return !bpf_bind(ctx, (struct sockaddr *)&a, sizeof(a));
}

/* Return the endpoint that a client of a Service with affinity had last, if it still serves. */
static __always_inline struct endpoint *pinned(struct client *c, struct service *s, u64 now)
{
	struct pin *was = pins.lookup(c);
	if (!was || now - was->seen >= (u64)s->affinity_seconds * 1000000000ull)
		return 0;
	u32 id = was->endpoint;
	struct endpoint *e = endpoints.lookup(&id);
	if (!e || e->service != s->id)
		return 0;
	was->seen = now;
	return e;
}

/* The constant in each branch keeps clang from merging them into one with a computed offset. */
#define SET_FLOW(n) \
	if (at == n) { \
		struct flow *w = &k->flow[n]; \
		w->frontend = *f; \
		w->endpoint = id; \
		w->address[0] = to->address[0]; \
		w->address[1] = to->address[1]; \
		w->address[2] = to->address[2]; \
		w->address[3] = to->address[3]; \
		w->port = to->port; \
		asm volatile("" :: "i"(n) : "memory"); \
	}
#define MATCH_FLOW(n) \
	if (k->flow[n].endpoint && k->flow[n].port == port && same_address(k->flow[n].address, a)) { \
		*f = k->flow[n].frontend; \
		asm volatile("" :: "i"(n) : "memory"); \
		return true; \
	}

/*
 * Choose an endpoint for frontend *f*; *datagram*: for one datagram of a socket that may send to several.
 * Return false to leave the destination as it is.
 */
static __always_inline bool choose(struct bpf_sock_addr *ctx, struct frontend *f, bool v4, bool datagram,
				   struct endpoint *to)
{
	int zero = 0;
	struct settings *set = settings.lookup(&zero);
	if (!set)
		return false;
	if (f->protocol != IPPROTO_TCP && f->protocol != IPPROTO_UDP)
		return false; /* Ping sockets and SCTP. */
	if (!datagram && f->protocol == IPPROTO_UDP && !(set->flags & CONNECTED_UDP))
		return false;
	if (set->flags & ONLY_NODE_CLIENTS && netns_cookie(ctx) != set->node_netns)
		return false;
	struct service *s = find(ctx, f, set);
	if (!s || !s->endpoints)
		return false;
	struct client c = { .service = s->id };
	if (s->affinity_seconds || s->flags)
		c.netns = netns_cookie(ctx);
	if (s->flags & MASQUERADES_PODS && !(set->flags & IGNORE_MASQUERADE) && c.netns != set->node_netns)
		return false;
	if (s->flags & HAS_LOCAL_ENDPOINTS && hairpins.lookup(&c))
		return false;

	struct bpf_sock *sk = ctx->sk;
	struct flows *k = 0;
	struct endpoint *e = 0;
	u32 id = 0;
	if (sk && datagram) {
		k = kept.sk_storage_get(sk, 0, 0);
		if (k) {
#pragma unroll
			for (int i = 0; i < 4; i++) {
				if (e || !k->flow[i].endpoint || !same_frontend(&k->flow[i].frontend, f))
					continue;
				id = k->flow[i].endpoint;
				e = endpoints.lookup(&id);
				if (e && e->service != s->id)
					e = 0;
			}
			if (e) {
				*to = *e;
				return true;
			}
		}
	}
	u64 now = 0;
	if (s->affinity_seconds) {
		now = bpf_ktime_get_ns();
		struct pin *was = pins.lookup(&c);
		if (was)
			id = was->endpoint;
		e = pinned(&c, s, now);
	}
	if (!e) {
		struct slot at = { s->id, bpf_get_prandom_u32() % s->endpoints };
		u32 *found = slots.lookup(&at);
		if (!found)
			return false;
		id = *found;
		e = endpoints.lookup(&id);
		if (!e)
			return false;
		if (s->affinity_seconds) {
			struct pin p = { now, id, 0 };
			pins.update(&c, &p);
		}
	}
	/* A datagram's socket cannot be bound here: that of a client to itself is not masqueraded. */
	/* The node's own clients keep the node's address, and may be allowed to bind any (ip_nonlocal_bind). */
	if (e->is_local && !datagram && c.netns != set->node_netns && (v4 ? is_own4(ctx, e) : is_own6(ctx, e))) {
		u32 one = 1;
		hairpins.update(&c, &one);
		return false;
	}
	*to = *e;

	if (!sk)
		return true;
	if (datagram) {
		if (!k)
			k = kept.sk_storage_get(sk, 0, 1);
		if (k) {
			u32 at = k->next++ % 4;
			SET_FLOW(0) SET_FLOW(1) SET_FLOW(2) SET_FLOW(3)
		}
	} else if (set->flags & KEEP_PEER || f->protocol == IPPROTO_UDP) {
		struct flow *w = peer.sk_storage_get(sk, 0, 1);
		if (w) {
			w->frontend = *f;
			w->endpoint = id;
			w->address[0] = to->address[0];
			w->address[1] = to->address[1];
			w->address[2] = to->address[2];
			w->address[3] = to->address[3];
			w->port = to->port;
		}
		if (f->protocol == IPPROTO_UDP) {
			u64 cookie = bpf_get_socket_cookie(ctx);
			struct connection made = {
				.address = { to->address[0], to->address[1], to->address[2], to->address[3] },
				.port = to->port, .endpoint = id };
			connected.update(&cookie, &made);
		}
	}
	return true;
}

/* Find the frontend through which this socket reached the endpoint at address *a* and *port*. */
static __always_inline bool reached(struct bpf_sock_addr *ctx, const u32 *a, u16 port, struct frontend *f)
{
	struct bpf_sock *sk = ctx->sk;
	if (!sk)
		return false;
	struct flow *p = peer.sk_storage_get(sk, 0, 0);
	if (p && p->port == port && same_address(p->address, a)) {
		*f = p->frontend;
		return true;
	}
	struct flows *k = kept.sk_storage_get(sk, 0, 0);
	if (!k)
		return false;
	MATCH_FLOW(0) MATCH_FLOW(1) MATCH_FLOW(2) MATCH_FLOW(3)
	return false;
}

static __always_inline int dial4(struct bpf_sock_addr *ctx, bool datagram)
{
	struct frontend f = { .address = { 0, 0, V4_MAPPED, ctx->user_ip4 }, .port = (u16)ctx->user_port,
			      .protocol = ctx->protocol };
	struct endpoint to;
	if (choose(ctx, &f, true, datagram, &to)) {
		ctx->user_ip4 = to.address[3];
		ctx->user_port = to.port;
	}
	return 1;
}

static __always_inline int dial6(struct bpf_sock_addr *ctx, bool datagram)
{
	struct frontend f = { .address = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] },
			      .port = (u16)ctx->user_port, .protocol = ctx->protocol };
	struct endpoint to;
	if (choose(ctx, &f, false, datagram, &to)) {
		ctx->user_ip6[0] = to.address[0];
		ctx->user_ip6[1] = to.address[1];
		ctx->user_ip6[2] = to.address[2];
		ctx->user_ip6[3] = to.address[3];
		ctx->user_port = to.port;
	}
	return 1;
}

static __always_inline int answer4(struct bpf_sock_addr *ctx)
{
	u32 a[4] = { 0, 0, V4_MAPPED, ctx->user_ip4 };
	struct frontend f;
	if (reached(ctx, a, (u16)ctx->user_port, &f)) {
		ctx->user_ip4 = f.address[3];
		ctx->user_port = f.port;
	}
	return 1;
}

static __always_inline int answer6(struct bpf_sock_addr *ctx)
{
	u32 a[4] = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] };
	struct frontend f;
	if (reached(ctx, a, (u16)ctx->user_port, &f)) {
		ctx->user_ip6[0] = f.address[0];
		ctx->user_ip6[1] = f.address[1];
		ctx->user_ip6[2] = f.address[2];
		ctx->user_ip6[3] = f.address[3];
		ctx->user_port = f.port;
	}
	return 1;
}

/* connect(2): TCP, MPTCP's first subflow, TCP Fast Open, and connected UDP where the operator wants that. */
int connect4(struct bpf_sock_addr *ctx) { return dial4(ctx, false); }
int connect6(struct bpf_sock_addr *ctx) { return dial6(ctx, false); }

/* sendto(2), sendmsg(2) with an address: the datagrams of one socket to one frontend stay with one endpoint. */
int sendmsg4(struct bpf_sock_addr *ctx) { return dial4(ctx, true); }
int sendmsg6(struct bpf_sock_addr *ctx) { return dial6(ctx, true); }

/* recvfrom(2), recvmsg(2) that ask for the sender: a reply bears the address that was dialled. */
int recvmsg4(struct bpf_sock_addr *ctx) { return answer4(ctx); }
int recvmsg6(struct bpf_sock_addr *ctx) { return answer6(ctx); }

/* getpeername(2): the address that was dialled. Accepted sockets call this too, and have nothing kept. */
int getpeername4(struct bpf_sock_addr *ctx) { return answer4(ctx); }
int getpeername6(struct bpf_sock_addr *ctx) { return answer6(ctx); }
