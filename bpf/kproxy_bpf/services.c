/*
 * Connect-time load balancing: local sockets that dial a frontend are sent to one of its endpoints before the first
 * packet exists. Anything not found here, or in doubt, is left as it is: the rules of the base mode decide.
 *
 * Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d, so that IPv4-mapped sockets and plain ones share every map: the
 * datagram of a mapped socket passes sendmsg4, its reply recvmsg6. Ports are big-endian, as in the socket address.
 *
 * A loader without CAP_PERFMON gets a stricter verifier:
 * - It refuses an offset that was computed from an index: the flows of a socket are accessed one by one.
 * - Before Linux 6.8 it refuses to write a part of eight bytes of the stack after another part: structures that are
 *   passed by address consist of 64-bit numbers.
 * - It follows both ways of a test whose result it knows, as a CPU may: no pointer is tested that is the constant 0 on
 *   some path. So functions do not return 0 for "none", and each lookup is tested where it is made.
 */

#define __always_inline inline __attribute__((always_inline))

#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define AF_INET 2
#define AF_INET6 10
#define ETH_P_IP 0x0800

/* A helper that bcc 0.26 has no name for (linux/bpf.h). */
#define netns_cookie(ctx) (((u64 (*)(void *))122)(ctx))

#define KIND_NODE_PORT_V4 4
#define KIND_NODE_PORT_V6 6

/* Halves of an address; port, protocol << 16 and kind << 24. */
struct frontend { u64 address[2]; u64 port; };
struct service { u64 id; u32 endpoints; u32 affinity_seconds; u32 flags; u32 padding; };
struct slot { u64 service; u64 index; };
/* Halves of an address; port, and is local << 16. */
struct endpoint { u64 address[2]; u64 port; };
struct member { struct endpoint endpoint; u64 service; };
struct address { u64 half[2]; };
struct client { u64 netns; u64 service; };
/* *from*: with the local port of the socket << 32. */
struct sender { u64 netns; struct frontend from; };
struct pin { u64 seen; struct endpoint endpoint; };
struct sockaddr;
/* *pods_left*: flags of frontends; sockets of pods are left to the rules where one of these is set. */
struct settings { u64 node_netns; u32 flags; u32 pods_left; };
struct flow { struct frontend frontend; struct endpoint endpoint; };
struct flows { struct flow flow[4]; u64 next; };
/*
 * Connections, those of them that failed, bytes and packets to and from the endpoint, and handshakes by their duration: up
 * to 250 us, 1 ms, 4 ms, 16 ms, 64 ms, 256 ms, 1 s, and longer; then the sum in microseconds.
 */
struct counts {
	u64 made; u64 refused; u64 unanswered; u64 reset; u64 bytes[2]; u64 packets[2]; u64 shaken[8]; u64 took;
};

#define ONLY_NODE_CLIENTS 1
#define KEEP_PEER 2
#define CONNECTED_UDP 4
#define COUNT_CONNECTIONS 8

/* Of a service: some of its endpoints are on this node, and may be the client itself. */
#define HAS_LOCAL_ENDPOINTS 1

#define NO_PREALLOC 1

/* kproxy doubles a hash that is full. */
BPF_F_TABLE("hash", struct frontend, struct service, frontends, 65536, NO_PREALLOC);
BPF_F_TABLE("hash", struct slot, struct endpoint, slots, 131072, NO_PREALLOC);
/* Endpoints of services with UDP or affinity: what a socket or a client remembers is valid as long as it is here. */
BPF_F_TABLE("hash", struct member, u64, endpoints, 131072, NO_PREALLOC);
BPF_F_TABLE("hash", struct address, u32, node_addresses, 4096, NO_PREALLOC);
/* Of interfaces of the node. A process here may listen where a frontend is, and rules may exempt it from NAT. */
BPF_F_TABLE("hash", struct address, u64, own_addresses, 4096, NO_PREALLOC);
/*
 * kproxy doubles it when half of it is in use, up to a bound; then those clients are forgotten that were away longest.
 * *pinned*: how many clients were added since the map was made.
 */
BPF_TABLE("lru_hash", struct client, struct pin, pins, 65536);
BPF_ARRAY(pinned, u64, 1);
/*
 * Clients that are endpoints of the Service they dial. The rules serve them, hairpin included: they masquerade it,
 * and if only these choices were left to them, the client itself would be chosen too rarely.
 */
BPF_TABLE("lru_hash", struct client, u64, hairpins, 16384);
/*
 * Senders of datagrams with the address and port of a frontend: a client may be bound to a node port, and the rules
 * masquerade with any port. What is sent back is left to the rules, which tell answers by the flow. As in a flow, the
 * local port is part of the key: another socket that is bound to it may answer.
 */
BPF_TABLE("lru_hash", struct sender, u64, senders, 4096);
/*
 * Connected UDP sockets by cookie, until they are closed: they are destroyed when their endpoint is removed. A socket
 * that finds no room is left to the rules.
 */
BPF_F_TABLE("hash", u64, struct member, connected, 65536, NO_PREALLOC);
/* New connections and flows by frontend and endpoint. */
BPF_TABLE("lru_hash", struct flow, struct counts, connections, 32768);
BPF_ARRAY(settings, struct settings, 1);
/* Sockets that send datagrams to several destinations, and connected sockets. */
BPF_SK_STORAGE(kept, struct flows);
BPF_SK_STORAGE(peer, struct flow);

/* Two words as they follow each other in memory, and the latter of them. */
static __always_inline u64 join(u32 first, u32 second)
{
	union { u32 word[2]; u64 both; } joined = { { first, second } };
	return joined.both;
}

static __always_inline u32 second_word(u64 both)
{
	union { u64 both; u32 word[2]; } joined = { both };
	return joined.word[1];
}

static __always_inline u64 v4_mapped(u32 address)
{
	union { u8 byte[4]; u32 word; } prefix = { { 0, 0, 0xff, 0xff } };
	return join(prefix.word, address);
}

static __always_inline u64 socket_family(u16 family, u32 next)
{
	union { u16 part[2]; u32 word; } family_and_port = { { family, 0 } };
	return join(family_and_port.word, next);
}

static __always_inline bool same_address(const u64 *a, const u64 *b)
{
	return a[0] == b[0] && a[1] == b[1];
}

/* The context and sockets are read by words: clang would merge two loads into one. */
static __always_inline u32 opaque(u32 word)
{
	asm volatile("" : "+r"(word));
	return word;
}

/* Bind a socket to an address, and to no port yet. Return whether the kernel allows that. */
static __always_inline bool can_bind(struct bpf_sock_addr *ctx, u64 first, u64 second, bool v4)
{
	if (v4) { /* struct sockaddr_in (linux/in.h) */
		u64 a[2] = { socket_family(AF_INET, second_word(second)), 0 };
		return !bpf_bind(ctx, (struct sockaddr *)a, sizeof(a));
	}
	/* struct sockaddr_in6 (linux/in6.h) */
	u64 a[4] = { socket_family(AF_INET6, 0), first, second, 0 };
	return !bpf_bind(ctx, (struct sockaddr *)a, 28);
}

/*
 * Return whether the endpoint's address may belong to the caller's own namespace: it is the source of the socket, or one
 * without a source can be bound to it. The port stays open; a client that is its own endpoint has this address as its
 * source anyway. Some sockets can be bound to any address (IP_FREEBIND, IP_TRANSPARENT, ip_nonlocal_bind), as one that
 * nobody has shows: 255.255.255.254 or 100::1 (RFC 6666). Such a socket gets no source here.
 */
static __always_inline bool may_be_own(struct bpf_sock_addr *ctx, struct bpf_sock *sk, const u64 *address, bool v4)
{
	if (v4 || (!address[0] && address[1] == v4_mapped(second_word(address[1])))) {
		if (sk->src_ip4)
			return sk->src_ip4 == second_word(address[1]);
	} else {
		u64 half[2] = {
			join(opaque(sk->src_ip6[0]), opaque(sk->src_ip6[1])),
			join(opaque(sk->src_ip6[2]), opaque(sk->src_ip6[3])),
		};
		if (half[0] || half[1])
			return same_address(half, address);
	}
	if (!can_bind(ctx, address[0], address[1], v4))
		return false;
	if (v4 || !address[0] ? can_bind(ctx, 0, v4_mapped(bpf_htonl(0xfffffffe)), v4)
			: can_bind(ctx, join(bpf_htonl(0x01000000), 0), join(0, bpf_htonl(1)), v4))
		can_bind(ctx, 0, v4 ? v4_mapped(0) : 0, v4);
	return true;
}

/* The context's IPv6 address is read and written in halves. */
#define HALF(n) (*(u64 *)&ctx->user_ip6[2 * (n)])

static __always_inline int redirect(struct bpf_sock_addr *ctx, const u64 *address, u64 port, bool v4)
{
	if (v4) {
		ctx->user_ip4 = second_word(address[1]);
	} else {
		HALF(0) = address[0];
		HALF(1) = address[1];
	}
	ctx->user_port = (u16)port;
	return 1;
}

/* Return a flow of *k*. The pointer is opaque: clang would merge branches into one with a computed offset. */
static __always_inline struct flow *flow_at(struct flows *k, int n)
{
	struct flow *one = &k->flow[n];
	asm volatile("" : "+r"(one));
	return one;
}

static __always_inline u64 node_port_kind(u64 first, u64 second)
{
	bool v4 = first == 0 && second == v4_mapped(second_word(second));
	return (u64)(v4 ? KIND_NODE_PORT_V4 : KIND_NODE_PORT_V6) << 24;
}

/*
 * Send a socket to an endpoint of the frontend it dials; *datagram*: one datagram of a socket that may send to several.
 * Return 1: whatever is not redirected proceeds as it is.
 */
static __always_inline int dial(struct bpf_sock_addr *ctx, u64 first, u64 second, bool v4, bool datagram)
{
	int zero = 0;
	struct settings *set = settings.lookup(&zero);
	struct bpf_sock *sk = ctx->sk;
	if (!set || !sk)
		return 1;
	u8 protocol = ctx->protocol;
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
		return 1; /* Ping sockets and SCTP. */
	if (!datagram && protocol == IPPROTO_UDP && !(set->flags & CONNECTED_UDP))
		return 1;
	if (set->flags & ONLY_NODE_CLIENTS && netns_cookie(ctx) != set->node_netns)
		return 1;

	/* The service of the frontend: by its address, or by its port where the address serves node ports. */
	struct frontend f = { { first, second }, (u16)ctx->user_port | (u64)protocol << 16 };
	if (datagram && sk->state == BPF_TCP_ESTABLISHED) { /* It only receives from the peer it is connected to. */
		struct flow *p = peer.sk_storage_get(sk, 0, 0);
		if (!p || p->frontend.port != f.port || !same_address(p->frontend.address, f.address))
			return 1;
		return redirect(ctx, p->endpoint.address, p->endpoint.port, v4);
	}
	struct address a = { { first, second } };
	struct service *s = frontends.lookup(&f);
	if (s) {
		if (own_addresses.lookup(&a))
			return 1;
	} else {
		u32 *only_node = node_addresses.lookup(&a);
		if (!only_node)
			return 1;
		/* Every pod has a loopback address of its own. */
		if (*only_node && netns_cookie(ctx) != set->node_netns)
			return 1;
		struct frontend n = { .port = f.port | node_port_kind(first, second) };
		s = frontends.lookup(&n);
		if (!s)
			return 1;
	}
	if (!s->endpoints)
		return 1;
	u64 netns = s->affinity_seconds || s->flags ? netns_cookie(ctx) : 0;
	struct client c = { netns, s->id };
	if (s->flags & set->pods_left && netns != set->node_netns)
		return 1;
	if (s->flags & HAS_LOCAL_ENDPOINTS && hairpins.lookup(&c))
		return 1;

	struct member to = { .service = s->id };
	if (datagram) {
		struct flows *k = kept.sk_storage_get(sk, 0, 0);
#pragma unroll
		for (int n = 0; k && n < 4; n++) {
			struct flow *one = flow_at(k, n);
			if (one->frontend.port != f.port || !same_address(one->frontend.address, f.address))
				continue;
			to.endpoint = one->endpoint;
			if (endpoints.lookup(&to))
				return redirect(ctx, to.endpoint.address, to.endpoint.port, v4);
		}
	}
	if (protocol == IPPROTO_UDP) {
		struct sender asked = { netns_cookie(ctx), { { first, second }, f.port | (u64)sk->src_port << 32 } };
		if (senders.lookup(&asked))
			return 1; /* An answer; if not, the rules know the endpoint. */
	}
	u64 now = 0;
	if (s->affinity_seconds) {
		/* The endpoint that this client had last, if it still serves. */
		now = bpf_ktime_get_ns();
		struct pin *was = pins.lookup(&c);
		if (was && now - was->seen < (u64)s->affinity_seconds * 1000000000ull) {
			to.endpoint = was->endpoint;
			if (endpoints.lookup(&to)) {
				was->seen = now;
				goto chosen;
			}
		}
	}
	struct slot at = { s->id, bpf_get_prandom_u32() % s->endpoints };
	struct endpoint *found = slots.lookup(&at);
	if (!found)
		return 1;
	to.endpoint = *found;
	if (s->affinity_seconds) {
		struct pin p = { now, to.endpoint };
		pins.update(&c, &p);
		u64 *number = pinned.lookup(&zero);
		if (number)
			lock_xadd(number, 1);
	}
chosen:
	/*
	 * A datagram's socket cannot be bound here: that of a client to itself is not masqueraded. The node's own clients
	 * keep the node's address.
	 */
	if (to.endpoint.port >> 16 && !datagram && netns != set->node_netns
			&& may_be_own(ctx, sk, to.endpoint.address, v4)) {
		u64 one = 1;
		hairpins.update(&c, &one);
		return 1;
	}
	if (!datagram && protocol == IPPROTO_UDP) {
		u64 cookie = bpf_get_socket_cookie(ctx);
		if (connected.update(&cookie, &to))
			return 1;
	}
	struct flow kept_flow = { f, to.endpoint };
	if (set->flags & COUNT_CONNECTIONS) {
		struct counts none = {};
		struct counts *number = connections.lookup_or_try_init(&kept_flow, &none);
		if (number)
			lock_xadd(&number->made, 1);
	}
	if (datagram) {
		struct flows *k = kept.sk_storage_get(sk, 0, 1);
		if (k) {
			u64 next = k->next++ % 4;
			if (next == 0)
				*flow_at(k, 0) = kept_flow;
			else if (next == 1)
				*flow_at(k, 1) = kept_flow;
			else if (next == 2)
				*flow_at(k, 2) = kept_flow;
			else
				*flow_at(k, 3) = kept_flow;
		}
	} else if (set->flags & (KEEP_PEER | COUNT_CONNECTIONS) || protocol == IPPROTO_UDP) {
		struct flow *w = peer.sk_storage_get(sk, 0, 1);
		if (w)
			*w = kept_flow;
	}
	return redirect(ctx, to.endpoint.address, to.endpoint.port, v4);
}

/*
 * Remember the sender of a datagram that belongs to no translated flow, if its address and port are a frontend's. Only
 * addresses with node ports are considered: few senders have one, and that map is small enough for the processor's
 * caches. Connected sockets answer without an address.
 */
static __always_inline void note_sender(struct bpf_sock_addr *ctx, struct bpf_sock *sk, u64 first, u64 second)
{
	struct address a = { { first, second } };
	if (sk->state == BPF_TCP_ESTABLISHED || !node_addresses.lookup(&a))
		return;
	struct frontend f = { { first, second }, (u16)ctx->user_port | (u64)ctx->protocol << 16 };
	struct frontend n = { .port = f.port | node_port_kind(first, second) };
	if (!frontends.lookup(&f) && !frontends.lookup(&n))
		return;
	struct sender asked = { netns_cookie(ctx), { { first, second }, f.port | (u64)sk->src_port << 32 } };
	u64 one = 1;
	senders.update(&asked, &one);
}

/* Show the frontend through which this socket reached the endpoint at an address, a *datagram*'s sender; return 1. */
static __always_inline int answer(struct bpf_sock_addr *ctx, u64 first, u64 second, bool v4, bool datagram)
{
	u64 a[2] = { first, second };
	u16 port = (u16)ctx->user_port;
	struct bpf_sock *sk = ctx->sk;
	if (!sk)
		return 1;
	int zero = 0;
	struct settings *set = settings.lookup(&zero);
	struct flow *p = peer.sk_storage_get(sk, 0, 0);
	if (p && (u16)p->endpoint.port == port && same_address(p->endpoint.address, a)) {
		if (ctx->protocol == IPPROTO_TCP && set && !(set->flags & KEEP_PEER))
			return 1; /* It is kept for the counts. */
		return redirect(ctx, p->frontend.address, p->frontend.port, v4);
	}
	struct flows *k = kept.sk_storage_get(sk, 0, 0);
#pragma unroll
	for (int n = 0; k && n < 4; n++) {
		struct flow *one = flow_at(k, n);
		if ((u16)one->endpoint.port == port && same_address(one->endpoint.address, a))
			return redirect(ctx, one->frontend.address, one->frontend.port, v4);
	}
	if (datagram)
		note_sender(ctx, sk, first, second);
	return 1;
}

static __always_inline int dial4(struct bpf_sock_addr *ctx, bool datagram)
{
	return dial(ctx, 0, v4_mapped(ctx->user_ip4), true, datagram);
}

static __always_inline int dial6(struct bpf_sock_addr *ctx, bool datagram)
{
	return dial(ctx, HALF(0), HALF(1), false, datagram);
}

static __always_inline int answer4(struct bpf_sock_addr *ctx, bool datagram)
{
	return answer(ctx, 0, v4_mapped(ctx->user_ip4), true, datagram);
}

static __always_inline int answer6(struct bpf_sock_addr *ctx, bool datagram)
{
	return answer(ctx, HALF(0), HALF(1), false, datagram);
}

/* connect(2): TCP, MPTCP's first subflow, TCP Fast Open, and connected UDP where the operator wants that. */
int connect4(struct bpf_sock_addr *ctx) { return dial4(ctx, false); }
int connect6(struct bpf_sock_addr *ctx) { return dial6(ctx, false); }

/* sendto(2), sendmsg(2) with an address: one socket sends all datagrams for a frontend to one endpoint. */
int sendmsg4(struct bpf_sock_addr *ctx) { return dial4(ctx, true); }
int sendmsg6(struct bpf_sock_addr *ctx) { return dial6(ctx, true); }

/* recvfrom(2), recvmsg(2) that ask for the sender: a reply bears the address that was dialled. */
int recvmsg4(struct bpf_sock_addr *ctx) { return answer4(ctx, true); }
int recvmsg6(struct bpf_sock_addr *ctx) { return answer6(ctx, true); }

/* getpeername(2): the address that was dialled. Accepted sockets call this too, and have nothing kept. */
int getpeername4(struct bpf_sock_addr *ctx) { return answer4(ctx, false); }
int getpeername6(struct bpf_sock_addr *ctx) { return answer6(ctx, false); }

/* The last close(2) of a socket. */
int release(struct bpf_sock *sk)
{
	if (sk->protocol == IPPROTO_UDP) {
		u64 cookie = bpf_get_socket_cookie(sk);
		connected.delete(&cookie);
	}
	return 1;
}

/* Return whether a socket connects to the endpoint that was chosen for it: it may have dialled again since. */
static __always_inline bool is_translated(struct bpf_sock_ops *ctx, const struct flow *p)
{
	if (bpf_ntohl(ctx->remote_port) != bpf_ntohs((u16)p->endpoint.port))
		return false;
	if (ctx->family == AF_INET)
		return p->endpoint.address[1] == v4_mapped(ctx->remote_ip4);
	u64 half[2] = {
		join(opaque(ctx->remote_ip6[0]), opaque(ctx->remote_ip6[1])),
		join(opaque(ctx->remote_ip6[2]), opaque(ctx->remote_ip6[3])),
	};
	return same_address(p->endpoint.address, half);
}

/* As `flow_at`, for the handshakes of one duration. */
static __always_inline void count_handshake(struct counts *number, int n)
{
	u64 *shaken = &number->shaken[n];
	asm volatile("" : "+r"(shaken));
	lock_xadd(shaken, 1);
}

/*
 * Count a handshake by the time from its first SYN until the answer. The kernel's first measurement of the round trip
 * is this time unless the SYN was sent again, a second after the first. Then it may be that of the last SYN, so that
 * each SYN counts as a second: Linux 6.5 and newer send the next five so.
 */
static __always_inline void handshake(struct counts *number, u64 us, u64 again)
{
	if (us < again * 1000000)
		us = again * 1000000;
	lock_xadd(&number->took, us);
	if (us < 250)
		count_handshake(number, 0);
	else if (us < 1000)
		count_handshake(number, 1);
	else if (us < 4000)
		count_handshake(number, 2);
	else if (us < 16000)
		count_handshake(number, 3);
	else if (us < 64000)
		count_handshake(number, 4);
	else if (us < 256000)
		count_handshake(number, 5);
	else if (us < 1000000)
		count_handshake(number, 6);
	else
		count_handshake(number, 7);
}

/*
 * Count failures and handshakes of translated TCP connections, which connection tracking knows by the endpoint only, if at
 * all. Where another program asks for the changes of state of other sockets, they are reported here, too.
 */
int outcomes(struct bpf_sock_ops *ctx)
{
	u32 op = ctx->op, first = ctx->args[0], second = ctx->args[1];
	/* Each connection calls this nine times: most calls end here. */
	if (op == BPF_SOCK_OPS_RTO_CB) { /* first: retransmissions before this one. */
		if (first || ctx->state != BPF_TCP_SYN_SENT)
			return 1;
	} else if (op == BPF_SOCK_OPS_STATE_CB) { /* first: the state before. */
		if (second != BPF_TCP_CLOSE)
			return 1;
		if (first != BPF_TCP_SYN_SENT && first != BPF_TCP_ESTABLISHED && first != BPF_TCP_FIN_WAIT1
				&& first != BPF_TCP_CLOSE_WAIT)
			return 1; /* Both sides have closed. */
	} else if (op != BPF_SOCK_OPS_TCP_CONNECT_CB && op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		return 1;
	}
	struct bpf_sock *sk = ctx->sk;
	if (!sk)
		return 1;
	struct flow *p = peer.sk_storage_get(sk, 0, 0);
	if (!p)
		return 1;
	if (op == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		if (is_translated(ctx, p))
			bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTO_CB_FLAG
				| BPF_SOCK_OPS_STATE_CB_FLAG);
		else
			peer.sk_storage_delete(sk);
		return 1;
	}
	struct counts *number = connections.lookup(p);
	if (!number)
		return 1;
	if (op == BPF_SOCK_OPS_RTO_CB) {
		lock_xadd(&number->unanswered, 1);
	} else if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		handshake(number, ctx->srtt_us >> 3, ctx->total_retrans);
	} else if (first == BPF_TCP_SYN_SENT) {
		if (ctx->segs_in) /* If not, the client gave up. */
			lock_xadd(&number->refused, 1);
	} else {
		lock_xadd(&number->reset, 1);
	}
	return 1;
}

/* Count a packet of a flow. One whose count was evicted is counted again once another connection begins. */
static __always_inline int carry(struct __sk_buff *skb, struct flow *of, bool received)
{
	struct counts *number = connections.lookup(of);
	if (number) {
		lock_xadd(&number->bytes[received], skb->len);
		lock_xadd(&number->packets[received], 1);
	}
	return 1;
}

/* Read the address and port of the other side: struct iphdr, ipv6hdr and udphdr (linux/ip.h, ipv6.h, udp.h). */
static __always_inline bool read_remote(struct __sk_buff *skb, bool received, struct endpoint *remote)
{
	u16 port = 0;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		union { u8 words; u32 word[5]; } head = {};
		if (bpf_skb_load_bytes(skb, 0, &head, sizeof(head))
				|| bpf_skb_load_bytes(skb, 4 * (head.words & 15) + (received ? 0 : 2), &port, 2))
			return false;
		remote->address[1] = v4_mapped(head.word[received ? 3 : 4]);
	} else if (bpf_skb_load_bytes(skb, received ? 8 : 24, remote->address, 16)
			|| bpf_skb_load_bytes(skb, received ? 40 : 42, &port, 2)) {
		return false;
	}
	remote->port = port;
	return true;
}

static __always_inline bool is_at(const struct flow *of, const struct endpoint *remote)
{
	return (u16)of->endpoint.port == remote->port && same_address(of->endpoint.address, remote->address);
}

/* Count a packet of a translated socket: a datagram by its other side, as one socket may send to several. */
static __always_inline int packet(struct __sk_buff *skb, bool received)
{
	struct bpf_sock *sk = skb->sk;
	if (!sk)
		return 1;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return 1;
	struct endpoint remote = {};
	if (sk->protocol == IPPROTO_TCP || sk->state == BPF_TCP_ESTABLISHED) {
		struct flow *p = peer.sk_storage_get(sk, 0, 0);
		if (!p)
			return 1;
		if (sk->protocol == IPPROTO_TCP || (read_remote(skb, received, &remote) && is_at(p, &remote)))
			carry(skb, p, received);
		return 1;
	}
	struct flows *k = kept.sk_storage_get(sk, 0, 0);
	if (!k || !read_remote(skb, received, &remote))
		return 1;
#pragma unroll
	for (int n = 0; n < 4; n++) {
		struct flow *one = flow_at(k, n);
		if (is_at(one, &remote))
			return carry(skb, one, received);
	}
	return 1;
}

/* Packets as the stack sends and receives them, as connection tracking counts them. */
int egress(struct __sk_buff *skb) { return packet(skb, false); }
int ingress(struct __sk_buff *skb) { return packet(skb, true); }
