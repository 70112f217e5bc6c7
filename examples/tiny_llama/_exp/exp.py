import sys,json,math,torch,time
from transformers import LlamaConfig,LlamaForCausalLM
from tokenizers import Tokenizer
name,corpus,steps,noise,lr,baseshare,wd=sys.argv[1],sys.argv[2],int(sys.argv[3]),float(sys.argv[4]),float(sys.argv[5]),float(sys.argv[6]),float(sys.argv[7])
import os
D=os.path.dirname(os.path.abspath(__file__))+'/'
d=json.load(open(D+corpus+'.json'));tok=Tokenizer.from_file(D+corpus+'.tok.json')
V=tok.get_vocab_size();ff=int(sys.argv[8]);ad=float(sys.argv[9]);torch.manual_seed(0);torch.set_num_threads(1)
S=d['ids'];size=len(S);nb=d['nbase'];data=torch.tensor(S+S[1:513]).cuda()
starts=torch.tensor([i+1 for i,t in enumerate(S) if t in (0,d['nl'])][:-1])
bst=starts[starts<nb]
m=LlamaForCausalLM(LlamaConfig(vocab_size=V,hidden_size=192,attention_dropout=ad,intermediate_size=ff,num_hidden_layers=4,num_attention_heads=6,num_key_value_heads=2,head_dim=32,max_position_embeddings=512,rms_norm_eps=1e-5,tie_word_embeddings=True,bos_token_id=0,eos_token_id=0)).cuda()
o=torch.optim.AdamW(m.parameters(),lr=lr,betas=(.9,.98),weight_decay=wd,fused=True)
W=(128,256,512);warm=200;t0=time.time();acc=0
for s in range(steps):
    p=max(0,(s-warm)/(steps-warm));r=min((s+1)/warm,.01+.99*.5*(1+math.cos(math.pi*p)))
    for g in o.param_groups:g['lr']=lr*r
    w=W[s%3];n=4096//w
    isb=torch.rand(n)<baseshare
    f=torch.where(isb,torch.randint(nb,(n,)),torch.randint(size,(n,)))
    st=torch.where(isb,bst[torch.randint(len(bst),(n,))],starts[torch.randint(len(starts),(n,))])
    f[::2]=st[::2]
    y=data[f.cuda()[:,None]+torch.arange(w,device='cuda')]
    x=y
    if noise: x=torch.where(torch.rand(y.shape,device='cuda')<noise,torch.randint(V,y.shape,device='cuda'),y)
    with torch.autocast('cuda',torch.bfloat16): l=m(input_ids=x,labels=y,use_cache=False).loss
    l.backward();torch.nn.utils.clip_grad_norm_(m.parameters(),1.);o.step();o.zero_grad()
    if s>=steps-100: acc+=l.item()/100
print('#####',sys.argv[1:],'loss',round(acc,3),round(time.time()-t0),'s')
m=m.to(torch.bfloat16).float().eval()
for q in ["The Python","A function is","An object","A class is","When the","Python is a","A list is","You can use","In this module"," the value of","If you want to","Strings are","The compiler","Hello","A dictionary","Objects are","Every module","The string","An exception"]:
    i=tok.encode(q,add_special_tokens=False).ids
    with torch.no_grad(): g=m.generate(input_ids=torch.tensor([i]).cuda(),attention_mask=torch.ones(1,len(i)).long().cuda(),max_new_tokens=60,do_sample=False)
    print('[%s]'%q+tok.decode(g[0,len(i):].tolist(),skip_special_tokens=False).replace('\n','/'))
