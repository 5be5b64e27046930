// SPDX-License-Identifier: GPL-2.0
/*
 * Shortcuts through User Mode Linux 6.1, which halve the CPU time of a guest. `init` loads them first.
 *
 * Page faults: the kernel maps a page into a process by a system call that it has the process make, which takes
 * three switches between them, and does so for each page that faults, even if its neighbours are in the page
 * cache. Here the neighbours are mapped as well, by the same call where they follow each other in memory.
 *
 * Floating point registers: the kernel reads them when a process enters it, and writes all of them back when the
 * process goes on. Here they are written only if they have changed.
 *
 * Memory of vmalloc, which BPF programs, maps and tables of rules are in: to map or unmap any of it, the kernel maps
 * all pages between again, one by one. Here it does so with those that have changed.
 */
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/uaccess.h>
#include <asm/tlbflush.h>
#include <asm/unistd.h>
#include <sysdep/ptrace_user.h>

#define IN_A_FILE (16 * PAGE_SIZE) /* mapped by the kernel around a fault in a file */
#define AROUND (4 * IN_A_FILE)
#define REGISTERS (FP_SIZE * sizeof(long))

/* Parameters: the addresses of these functions of the kernel. */
static unsigned long segv, handle_page_fault;
static unsigned long userspace, copy_context_skas0, get_fp_registers, put_fp_registers;
static unsigned long kernel_range, flush_tlb_kernel_range_common, map_memory;
module_param(segv, ulong, 0);
module_param(handle_page_fault, ulong, 0);
module_param(userspace, ulong, 0);
module_param(copy_context_skas0, ulong, 0);
module_param(get_fp_registers, ulong, 0);
module_param(put_fp_registers, ulong, 0);
module_param_named(flush_tlb_kernel_range, kernel_range, ulong, 0); /* declared by tlbflush.h */
module_param(flush_tlb_kernel_range_common, ulong, 0);
module_param(map_memory, ulong, 0);

extern long syscall(long number, ...); /* of the host */

/* Map the pages around *address* in its area. Return false if the kernel itself has to handle the fault. */
static bool map_around(unsigned long address, bool is_write)
{
	struct mm_struct *mm = current->mm;
	struct vm_area_struct *vma;
	unsigned int flags = FAULT_FLAG_USER;
	unsigned long start, end, at, step = IN_A_FILE;
	bool is_mapped = false;
	pte_t *pte;

	if (faulthandler_disabled() || !mmap_read_trylock(mm))
		return false;
	vma = vma_lookup(mm, address);
	if (!vma || vma->vm_flags & (VM_SHARED | VM_IO | VM_PFNMAP | VM_MIXEDMAP))
		goto out;
	if (!(vma->vm_flags & (is_write ? VM_WRITE : VM_READ | VM_EXEC)))
		goto out;
	if (vma->vm_flags & VM_WRITE) {
		/* A page that is mapped for reading would fault again when it is written. */
		flags |= FAULT_FLAG_WRITE;
		step = PAGE_SIZE;
	}
	if (handle_mm_fault(vma, address, flags, NULL) & VM_FAULT_ERROR)
		goto out;

	start = max(round_down(address, AROUND), vma->vm_start);
	end = min(round_down(address, AROUND) + AROUND, vma->vm_end);
	pte = pte_offset_kernel(pmd_off(mm, start), start);
	for (at = start; at < end; at = round_down(at + step, step))
		if (pte_none(pte[(at - start) / PAGE_SIZE]))
			handle_mm_fault(vma, at, flags, NULL);
	is_mapped = pte_present(pte[(address - start) / PAGE_SIZE]);
	flush_tlb_range(vma, start, end);
out:
	mmap_read_unlock(mm);
	return is_mapped;
}

static int handle_fault(unsigned long address, unsigned long ip, int is_write, int is_user, int *code)
{
	if (is_user && map_around(address, is_write))
		return 0;
	return ((typeof(&handle_fault))handle_page_fault)(address, ip, is_write, is_user, code);
}

static int known_pid; /* of a process whose registers are those in `known`; 0: none */
static u8 known[REGISTERS];

static int get_registers(int pid, unsigned long *registers)
{
	int error = ((typeof(&get_registers))get_fp_registers)(pid, registers);

	known_pid = error ? 0 : pid;
	memcpy(known, registers, REGISTERS);
	return error;
}

static int put_registers(int pid, unsigned long *registers)
{
	known_pid = 0;
	return ((typeof(&put_registers))put_fp_registers)(pid, registers);
}

static int put_changed_registers(int pid, unsigned long *registers)
{
	if (pid == known_pid && !memcmp(known, registers, REGISTERS))
		return 0;
	return put_registers(pid, registers);
}

static pgd_t *tables; /* of the kernel's memory: init_mm.pgd */

/* Pages that follow each other, to be mapped to *physical* or unmapped. */
struct run {
	unsigned long start, end, physical;
	bool is_present;
};

static void end_run(struct run *run)
{
	unsigned long length = run->end - run->start;

	if (length && run->is_present)
		((void (*)(unsigned long, unsigned long, unsigned long, int, int, int))map_memory)(
			run->start, run->physical, length, 1, 1, 1);
	else if (length)
		syscall(__NR_munmap, run->start, length);
}

static void add_page(struct run *run, unsigned long at, pte_t pte)
{
	unsigned long physical = pte_val(pte) & PAGE_MASK;
	bool is_present = pte_present(pte);

	if (at != run->end || is_present != run->is_present ||
	    (is_present && physical != run->physical + (at - run->start))) {
		end_run(run);
		*run = (struct run){ .start = at, .physical = physical, .is_present = is_present };
	}
	run->end = at + PAGE_SIZE;
}

static pud_t *pud_of(unsigned long at)
{
	return pud_offset(p4d_offset(tables + pgd_index(at), at), at);
}

static int flush_changed(unsigned long start, unsigned long end)
{
	struct run run = {};
	unsigned long at, next;
	pud_t *pud;
	pmd_t *pmd;
	pte_t *pte;

	for (at = start; at < end; at = next) {
		pud = pud_of(at);
		next = pgd_addr_end(at, end);
		if (!pud_present(*pud))
			continue;
		pmd = pmd_offset(pud, at);
		next = pmd_addr_end(at, end);
		if (!pmd_present(*pmd))
			continue;
		for (pte = pte_offset_kernel(pmd, at); at < next; at += PAGE_SIZE, pte++)
			if (pte_newpage(*pte)) {
				add_page(&run, at, *pte);
				*pte = pte_mkuptodate(*pte);
			}
	}
	end_run(&run);
	return 1;
}

static const struct {
	unsigned long *caller, *callee;
	void *replacement;
} calls[] = { /* The first call of each callee in its caller is replaced. */
	{ &segv, &handle_page_fault, handle_fault },
	{ &userspace, &get_fp_registers, get_registers },
	{ &userspace, &put_fp_registers, put_changed_registers },
	{ &copy_context_skas0, &put_fp_registers, put_registers },
	{ &kernel_range, &flush_tlb_kernel_range_common, flush_changed },
};

/* Return where *caller* has the address of *callee*, a constant in its code, and make that writable. */
static void *find(unsigned long caller, unsigned long callee)
{
	u8 *at = (u8 *)caller, *end = at + PAGE_SIZE / 4;

	if (!caller || !callee)
		return ERR_PTR(-EINVAL);
	while (memcmp(at, &callee, sizeof(callee)))
		if (++at == end)
			return ERR_PTR(-ENXIO);
	if (syscall(__NR_mprotect, (unsigned long)at & PAGE_MASK, 2 * PAGE_SIZE, 7 /* rwx */))
		return ERR_PTR(-EACCES);
	return at;
}

/* Find `tables` where their function reads them, and see that they translate an address of vmalloc. */
static int find_tables(void)
{
	u8 *at = (u8 *)flush_tlb_kernel_range_common, *end = at + 256;
	unsigned long here = (unsigned long)&tables;
	pgd_t **pgd;

	while (memcmp(at, "\x48\xa1", 2)) /* movabs ADDRESS,%rax */
		if (++at == end)
			return -ENXIO;
	memcpy(&pgd, at + 2, sizeof(pgd));
	tables = *pgd;
	return pte_page(*pte_offset_kernel(pmd_offset(pud_of(here), here), here)) == vmalloc_to_page((void *)here) ? 0 : -ENXIO;
}

static int __init shortcuts_init(void)
{
	void *found[ARRAY_SIZE(calls)];
	int i, error;

	for (i = 0; i < ARRAY_SIZE(calls); i++) {
		found[i] = find(*calls[i].caller, *calls[i].callee);
		if (IS_ERR(found[i]))
			return PTR_ERR(found[i]);
	}
	error = find_tables();
	if (error)
		return error;
	for (i = 0; i < ARRAY_SIZE(calls); i++)
		memcpy(found[i], &calls[i].replacement, sizeof(void *));
	return 0;
}
module_init(shortcuts_init);
MODULE_DESCRIPTION("Shortcuts through User Mode Linux");
MODULE_LICENSE("GPL");
