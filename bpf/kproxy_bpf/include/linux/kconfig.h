/* bcc includes this header first. No kernel headers are needed for programs that read no kernel structure. */
#define CONFIG_BPF_SYSCALL 1
#define __KERNEL__ 1
